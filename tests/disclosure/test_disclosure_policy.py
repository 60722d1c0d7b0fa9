"""The site's own rules: what they say of methods, counts and audits, and mistakes in the file."""

from __future__ import annotations

from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disclosure.test_disclosure_statement import NETWORK
from fedbicross.disclosure import policy as policies
from fedbicross.disclosure.policy import AuditRule, Policy, load_policy, reasons_against
from fedbicross.errors import ConfigError, PolicyError
from fedbicross.messages import Upload
from fedbicross.methods import METHODS, create
from fedbicross.methods.base import Method
from small import tiny_context

TASK = tiny_context().task


def write(folder: Path, text: str) -> Path:
    file = folder / "policy.toml"
    file.write_text(text)
    return file


def test_a_whole_policy_is_read(tmp_path: Path) -> None:
    found = load_policy(
        write(
            tmp_path,
            'methods = ["primum", "ensemble:consensus", "fedavg:personal"]\nothers_receive = ["one_model"]\n'
            'smallest_count = 10\nbelow = "suppress"\n'
            "[audit]\nquick = true\nmax_auc = 0.6\nmax_advantage = 0.1\nmax_memorised = 0.05\neffort = {shadows = 6}\n",
        )
    )
    assert found.audit is not None
    assert found.audit.trying.shadows == 6
    assert found.audit.trying.epochs == 20
    assert found.audit.limits == {"max_auc": 0.6, "max_advantage": 0.1, "max_memorised": 0.05}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('methods = ["primus"]', "unknown_method"),
        ('methods = ["ensemble:mean"]', "unknown_variant"),
        ('others_receive = ["everything"]', "bad_value"),
        ("smallest = 5", "unknown_key"),
        ("smallest_count = -1", "bad_value"),
        ('below = "round_up"', "bad_value"),
        ("[audit]\nmax_auc = 0.4", "bad_value"),
        ("[audit]\nmax_auc = nan", "bad_value"),
        ("[audit]\neffort = {shadows = 3}", "bad_value"),
        ("[audit]\neffort = {shadow = 4}", "unknown_key"),
        ("[audit]\nrequired = false\nmax_auc = 0.6", "audit"),
        ("smallest_count =", "bad_toml"),
    ],
)
def test_a_mistake_is_named_before_anything_is_trained(tmp_path: Path, text: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(write(tmp_path, text))
    assert caught.value.code == code


def test_policy_of_the_folder_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    with chdir(tmp_path):
        assert policies.policy_here(None) is None
        write(tmp_path, "smallest_count = 7")
        assert policies.policy_here(None) == Policy(smallest_count=7)
        other = tmp_path / "other.toml"
        other.write_text("smallest_count = 8")
        assert policies.policy_here(other) == Policy(smallest_count=8)
        (tmp_path / "policy.toml").unlink()
        (tmp_path / "policy.toml").symlink_to(tmp_path / "gone.toml")  # somebody wanted one: not silently without
        with pytest.raises(ConfigError):
            policies.policy_here(None)


def refused(work: Any, *given: Any) -> str:
    with pytest.raises(PolicyError) as caught:
        work(*given)
    assert caught.value.exit_status == 7
    return caught.value.code


def test_methods_by_name_and_by_variant() -> None:
    method = create("ensemble:consensus")
    for allowed in (["ensemble"], ["fedavg", "ensemble:consensus"]):
        policies.check_method(Policy(methods=allowed), "ensemble:consensus", method)
    for allowed in ([], ["fedavg"], ["ensemble:mean_probs"]):
        assert refused(policies.check_method, Policy(methods=allowed), "ensemble:consensus", method) == "policy_method"


def test_what_others_receive_is_part_of_it() -> None:
    only_one = Policy(others_receive=["nothing", "one_model"])
    policies.check_method(only_one, "primum", create("primum"))
    assert refused(policies.check_method, only_one, "ensemble", create("ensemble")) == "policy_others"


def test_every_method_says_what_others_receive() -> None:
    """Itself, or the family of methods that it belongs to; the base class's answer would be a guess."""
    for cls in METHODS.values():
        above = cls.__mro__[: cls.__mro__.index(Method)]
        assert any("others_receive" in vars(part) for part in above), cls


def counted(counts: list[int] | None, total: int | None = None) -> Upload:
    return Upload("north", TASK, class_counts=counts, num_samples=total)


def test_small_counts_are_refused_or_suppressed() -> None:
    strict, hiding = Policy(smallest_count=5), Policy(smallest_count=5, below="suppress")
    for fine in (counted([0, 5, 9], 14), counted(None), counted(None, 5)):
        assert policies.apply_counts(strict, fine) is fine
    assert refused(policies.apply_counts, strict, counted([0, 4, 9], 13)) == "policy_count"
    hidden = policies.apply_counts(hiding, counted([2, 4, 9], 15))
    assert hidden.class_counts == [0, 0, 9]
    assert hidden.num_samples == 9  # or the difference would tell
    assert policies.apply_counts(hiding, counted([2, 4, 9])).num_samples is None
    assert refused(policies.apply_counts, hiding, counted([2, 4, 0], 6)) == "policy_count"
    assert refused(policies.apply_counts, hiding, counted(None, 3)) == "policy_count"


def test_audit_is_held_against_the_limits() -> None:
    assert reasons_against(AuditRule(), NETWORK) == []
    assert reasons_against(AuditRule(max_auc=0.66), NETWORK) == []
    (reason,) = reasons_against(AuditRule(max_auc=0.65), NETWORK)  # the upper end is 0.66
    assert "0.660, over max_auc = 0.65" in reason
    (reason,) = reasons_against(AuditRule(max_advantage=0.1), NETWORK)
    assert "0.120" in reason
    (reason,) = reasons_against(AuditRule(max_memorised=0.04), NETWORK)  # 9 of 200
    assert "0.045" in reason
    assert len(reasons_against(AuditRule(max_auc=0.5, max_advantage=0, max_memorised=0), NETWORK)) == 3


def test_what_cannot_be_measured_stays() -> None:
    assert reasons_against(AuditRule(max_auc=0.5), {"kind": "nothing"}) == []
    assert "not measured" in reasons_against(AuditRule(max_auc=0.9), {"kind": "features"})[0]
    assert reasons_against(AuditRule(), {"kind": "features"}) == []
    assert reasons_against(AuditRule(), {"kind": "not_audited"})


def test_stricter_than_the_agreement_wins() -> None:
    """Rules on counts come on top of those that all sites agreed on."""
    upload = replace(counted([6, 9]), num_samples=15)
    assert refused(policies.apply_counts, Policy(smallest_count=7), upload) == "policy_count"


def test_the_policy_in_the_documentation_can_be_used(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "audit-an-upload.md").read_text()
    shown = page.split("```toml\n")[1].split("```")[0]
    found = load_policy(write(tmp_path, shown))
    assert found.below == "suppress"
    assert found.audit is not None
    assert found.audit.limits == {"max_auc": 0.6}
