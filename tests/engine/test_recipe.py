from __future__ import annotations

import pytest

from fedbicross.engine.recipe import Training, lr_multiplier


def test_the_default_is_the_papers_recipe() -> None:
    recipe = Training()
    assert (recipe.lr, recipe.momentum, recipe.weight_decay) == (1e-3, 0.9, 5e-4)
    assert (recipe.batch_size, recipe.epochs, recipe.validation) == (128, 100, 0.1)
    assert (recipe.schedule, recipe.augment, recipe.select) == ("step", False, "best")


def test_steps_at_half_and_three_quarters() -> None:
    rates = [Training().rate(epoch) for epoch in range(100)]
    assert rates == pytest.approx([1e-3] * 50 + [1e-4] * 25 + [1e-5] * 25)


def test_modern_recipe_fills_what_is_not_given() -> None:
    recipe = Training(recipe="modern", augment=False)
    assert (recipe.lr, recipe.schedule, recipe.augment) == (1e-2, "cosine", False)
    assert recipe.rate(0) == pytest.approx(1e-2)
    assert recipe.rate(50) == pytest.approx(5e-3)
    assert Training(schedule="constant").rate(99) == 1e-3


def test_cross_entropy_unless_asked_for_balanced_classes() -> None:
    assert not Training().balanced and not Training(recipe="modern").balanced
    assert Training(loss="balanced").balanced
    with pytest.raises(ValueError, match="loss"):
        Training(loss="focal")


def test_multipliers_of_the_learning_rate() -> None:
    assert [lr_multiplier("step", p) for p in (0.0, 0.49, 0.5, 0.75)] == pytest.approx([1, 1, 0.1, 0.01])
    assert [lr_multiplier("cosine", p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1, 0.5, 0])
    assert lr_multiplier("constant", 0.9) == 1
    assert [lr_multiplier("step", p, milestones=(0.4, 0.8)) for p in (0.3, 0.4, 0.8)] == pytest.approx([1, 0.1, 0.01])
