from __future__ import annotations

import numpy as np

from fedbicross.federation import simulate
from fedbicross.messages import Client
from fedbicross.methods import create
from small import tiny_clients, tiny_context


def test_answers_the_most_frequent_class_whatever_the_image() -> None:
    images = tiny_clients(1)[0].images[:5]
    client = Client("a", images, np.array([2, 1, 2, 0, 2]))
    probabilities = simulate(create("majority"), [client], tiny_context())["a"].probabilities(images[:2])
    assert np.allclose(probabilities, [[0.2, 0.2, 0.6]] * 2)
