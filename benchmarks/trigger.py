"""Can a search for triggers tell a network with a back door from honest ones? `python -m benchmarks.trigger`.

In the manner of Neural Cleanse: for each network and class, the smallest mask and pattern that turn nearly all of some
images into that class. A back door should need a far smaller one than the same class needs in the other sites'
networks. The server has no images, so they are pink noise, or inverted from the network itself. The answer was no, at
seconds per network: docs/how-to/threat-model.md. Federations, back door and networks are those of `benchmarks.poison`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import poison
from fedbicross import models, steps
from fedbicross.messages import Predictor, Upload
from fedbicross.methods import create
from fedbicross.runs.environment import versions
from fedbicross.runs.store import RunFolder
from fedbicross.steps.noise import pink

OUT = poison.ROOT / "results" / "benchmarks" / "trigger.json"
FEDERATIONS = [poison.dirichlet(5, 0.5, seed) for seed in (1, 2)]
SETTINGS = {"images": 32, "steps": 80, "lr": 0.15, "goal": 0.9, "steps_inversion": 60, "lr_inversion": 0.1}


def network_of(upload: Upload) -> nn.Module:
    task = upload.task
    network = models.build(task.model, task.channels, len(task.classes), task.image_size)
    network.load_state_dict(dict(upload.tensors))
    return network.eval().requires_grad_(False)


def inverted(network: nn.Module, shape: tuple[int, int, int], classes: int) -> Tensor:
    """Images that the network takes for each class in turn, with its own batch-normalisation statistics."""
    x = (0.5 * torch.randn((SETTINGS["images"], *shape), generator=torch.Generator().manual_seed(0))).requires_grad_()
    labels, terms = torch.arange(int(SETTINGS["images"])) % classes, list[Tensor]()

    def compare(layer: nn.Module, given: tuple[Tensor], answer: Tensor) -> None:
        del answer
        mean, var = given[0].mean((0, 2, 3)), given[0].var((0, 2, 3))
        usual = layer.running_var + 1e-3
        terms.append(((mean - layer.running_mean).square() / usual + (var / usual + 1e-6).log().square()).mean())

    hooks = [m.register_forward_hook(compare) for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    optimiser = torch.optim.Adam([x], lr=SETTINGS["lr_inversion"])
    for _ in range(int(SETTINGS["steps_inversion"])):
        terms.clear()
        answers = network(x)  # fills the terms
        loss = F.cross_entropy(answers, labels) + torch.stack(terms).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            x.clamp_(-1, 1)
    for hook in hooks:
        hook.remove()
    return x.detach()


def smallest_masks(network: nn.Module, x: Tensor, classes: int) -> Tensor:
    """For each class [C], in pixels, the smallest mask seen with which the goal's share of the images goes to it."""
    side, count = x.shape[-1], len(x)
    mask = torch.full((classes, 1, side, side), -2.0).requires_grad_()
    pattern = torch.zeros(classes, x.shape[1], side, side).requires_grad_()
    best, price = torch.full((classes,), float(side * side)), torch.full((classes,), 1e-3)
    targets = torch.arange(classes).repeat_interleave(count)
    optimiser = torch.optim.Adam([mask, pattern], lr=SETTINGS["lr"])
    for _ in range(int(SETTINGS["steps"])):
        m = torch.sigmoid(mask)[:, None]
        marked = (1 - m) * x + m * torch.tanh(pattern)[:, None]
        answers = network(marked.flatten(0, 1))
        size = m.sum((1, 2, 3, 4))
        loss = F.cross_entropy(answers, targets, reduction="none").reshape(classes, count).mean(1) + price * size
        with torch.no_grad():
            done = (answers.argmax(1) == targets).reshape(classes, count).float().mean(1) >= SETTINGS["goal"]
            best = torch.where(done & (size < best), size, best)
            price = torch.where(done, price * 1.15, price / 1.25).clamp(1e-5, 1.0)
        optimiser.zero_grad()
        loss.sum().backward()
        optimiser.step()
    return best


def searched(settings: dict[str, Any], store: Any) -> dict[str, Any]:
    """Masks [N,C] of the honest networks and [C] of the one with the back door, by kind of image."""
    fed = poison.federation({**poison.SMALLER, **settings}, store)
    method, task = create("fedavg"), fed.ctx.task
    uploads = [method.upload(client, fed.ctx) for client in fed.clients]
    bad = method.upload(poison.back_door(fed.clients[poison.ATTACKER]), fed.ctx)
    marked = poison.with_trigger(fed.test_images[fed.test_labels != poison.TARGET])
    answers = Predictor(task, (task.model,), (dict(bad.tensors),)).probabilities(marked).argmax(1)
    row: dict[str, Any] = {"seed": fed.ctx.seed, "opened": float((answers == poison.TARGET).mean())}
    noise = pink((int(SETTINGS["images"]), *task.image_shape), torch.Generator().manual_seed(0))
    for kind in ("pink", "inverted"):
        masks, began = [], time.process_time()
        for upload in (*uploads, bad):
            network = network_of(upload)
            x = noise if kind == "pink" else inverted(network, task.image_shape, len(task.classes))
            masks.append(smallest_masks(network, x, len(task.classes)))
        seconds = (time.process_time() - began) / len(masks)
        honest, logs = torch.stack(masks[:-1]), (torch.stack(masks[:-1]) + 1).log()
        usual = steps.outliers.medians_of_others(logs)
        found = (usual[poison.ATTACKER, poison.TARGET] - (masks[-1][poison.TARGET] + 1).log()).exp()
        row[kind] = {"seconds_per_network": round(seconds, 1), "honest": honest.tolist(), "bad": masks[-1].tolist()}
        row[kind] |= {"times_smaller": float(found), "honest_times_smaller": (usual - logs).exp().flatten().tolist()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trigger", description=__doc__)
    parser.add_argument("--cache", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, RunFolder(given.cache or Path(folder)) as cache:
        rows = []
        for settings in FEDERATIONS:
            rows.append(searched(settings, cache.store))
            print(rows[-1], flush=True)
    out = {"rows": rows, "config": {**poison.COMMON, **poison.SMALLER}, "settings": SETTINGS}
    OUT.write_text(json.dumps({**out, "versions": versions("cpu")}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
