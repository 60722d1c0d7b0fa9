"""DP-SGD on real images: `python -m benchmarks.private_training --data-dir DIR [--device cuda --jobs 12]`.

First the settings of the training with noise are chosen for each ε, on images that one site of Blood held back from
its training, in a federation that is not measured afterwards. Then federations of five sites: what a site has alone,
without noise, since nothing leaves it; the network with noise that it would send; what a server makes of all of these;
and the site's gate between its own model and that one. Each on the site's own test images and on all of them.

What a choice of settings tells of the images that it was made on is not accounted for. Uploads of `primum` need
batch-normalisation statistics and balanced classes, and cannot be private: here its gate judges other shared models.

With `--features DIR`, where features of EfficientNet-Lite0 are kept, the same for `analytic`, which sends sums of them
behind noise and needs no DP-SGD. A data set that is a folder in `--data-dir` is seen at 224 pixels. `--quick` is for
trying the script: drawn cells, one ε, one epoch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.privacy import ENCODER, Kept
from fedbicross import models
from fedbicross.context import Context, Store, Task
from fedbicross.data import load_dataset
from fedbicross.data.cells import load_cells
from fedbicross.data.dataset import Dataset
from fedbicross.data.partition import make_partition
from fedbicross.engine import private
from fedbicross.engine.recipe import PrivateTraining, Training
from fedbicross.errors import MethodError
from fedbicross.evaluate import protocols
from fedbicross.federation import simulate
from fedbicross.messages import Client, Predictor
from fedbicross.methods import create
from fedbicross.parts.local import own_model
from fedbicross.runs.environment import versions
from fedbicross.runs.runner import make_clients
from fedbicross.seeds import numpy_rng

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "privacy"
DELTA = 1e-5
ENCODER_SIZE, FOLDER_SIZE = 96, 224  # pixels that the encoder sees, at least; of images from files
PARTITIONS = {"iid": "5 sites, alike", "dirichlet": "5 sites, α = 0.5"}
DEVELOPMENT_SEED = 100
GRID = [
    {"epochs": epochs, "batch_size": batch, "lr": lr}
    for (epochs, batch), lr in product(((10, 256), (30, 256), (30, 1024)), (0.03, 0.1, 0.3))
]
ALONE, NOISY = "alone, without noise", "alone, with the noise"
SHARED = ("fedavg", "ensemble", "ensemble:class_weighted")
GATED = ("fedavg:personal", "ensemble:personal")
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Plan:
    """What all jobs of a run have in common."""

    data_dir: Path | None
    device: str
    model: str  # with batch normalisation; with noise, that of the same name with group normalisation
    epochs: int  # of training alone
    epsilons: tuple[float, ...]
    grid: tuple[Mapping[str, Any], ...]
    drawn: bool = False  # cells that a program drew, in place of a data set
    images: int | None = None  # of each site; none: all that there are
    tests: int | None = None
    products: bool = False  # convolutions of single images as products of matrices: the same numbers, another speed

    @property
    def recipe(self) -> Training:
        """Training without noise: of what stays at home."""
        return Training(recipe="modern", epochs=self.epochs, batch_size=64)

    def with_noise(self, epsilon: float, settings: Mapping[str, Any]) -> Training:
        """Training of what leaves."""
        dp = PrivateTraining(epsilon=epsilon, delta=DELTA, **settings)
        return self.recipe.model_copy(update={"dp": dp})

    def load(self, name: str) -> Dataset:
        """The data set, or as many images of it as were asked for, drawn by lot."""
        folder = (self.data_dir or Path()) / name
        if self.drawn:
            data = load_cells(8, 0, 300, 90)
        elif folder.is_dir():
            data = load_dataset(folder, image_size=FOLDER_SIZE)
        else:
            data = load_dataset(name, data_dir=self.data_dir)
        rng = np.random.default_rng(0)
        train, test = (
            part.take(np.sort(rng.permutation(len(part.labels))[:most]))
            for part, most in ((data.train, self.images and 5 * self.images), (data.test, self.tests))
        )
        return Dataset(data.name, data.classes, train, test, data.note)

    def context(self, data: Dataset, model: str, training: Training, seed: int) -> Context:
        task = Task(tuple(data.classes), data.image_size, data.channels, model)
        return Context(task, training, seed=seed, device=self.device)


class AsProducts(TorchFunctionMode):
    """A convolution as a product of matrices: a GPU is slow at the grouped convolutions that single gradients need."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.conv2d:
            return func(*args, **(kwargs or {}))
        image, weight, bias, stride, padding, dilation, groups = args
        if groups != 1:
            return func(*args)
        patches = F.unfold(image, weight.shape[2:], dilation, padding, stride)
        high = (image.shape[2] + 2 * padding[0] - dilation[0] * (weight.shape[2] - 1) - 1) // stride[0] + 1
        found = (weight.flatten(1) @ patches).unflatten(2, (high, -1))
        return found if bias is None else found + bias[:, None, None]


_by_convolutions = private.clipped_sums


def sums_by_products(*given: Any) -> Any:
    with AsProducts():
        return _by_convolutions(*given)


def begin(products: bool) -> None:
    """In every process."""
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True  # training alone is made again in each process, and must be the same
    if products:
        private.clipped_sums = sums_by_products


def speeds(model: str, device: str, images: int, size: int) -> dict[str, float]:
    """Gradients of single images a second, both ways."""
    network = models.build(f"{model}_gn", 3, 8, size).to(device)
    x, y = torch.randn(images, 3, size, size, device=device), torch.zeros(images, dtype=torch.int64, device=device)
    found = {}
    for name, way in (("convolutions", _by_convolutions), ("products", sums_by_products)):
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            for _ in range(3):
                loss = way(network, dict(network.named_parameters()), x, y, 1.0)[0]
            loss.item()
            found[name] = round(3 * images / (time.perf_counter() - began))
    return found


def dealt(data: Dataset, kind: str, seed: int) -> tuple[list[Client], dict[str, int], protocols.TestSet]:
    """Five sites, and whose test images are whose."""
    partition = make_partition(data, kind, 5, numpy_rng(seed, "partition"), seed=seed, alpha=0.5)
    clients, owners = make_clients(data, partition)
    return clients, owners, protocols.TestSet(data.test.labels, partition.test_owner, data.test.patients)


def tried(job: tuple[float, Mapping[str, Any]], plan: Plan, data_name: str) -> dict[str, Any]:
    """One setting of the training with noise, on the images that the site held back. No test image is looked at."""
    epsilon, settings = job
    begin(plan.products)
    data = plan.load(data_name)
    site = dealt(data, "iid", DEVELOPMENT_SEED)[0][0]
    ctx = plan.context(data, f"{plan.model}_gn", plan.with_noise(epsilon, settings), DEVELOPMENT_SEED)
    began = time.monotonic()
    last = ctx.local_model(site).history[-1]
    return {
        "epsilon": epsilon,
        "settings": dict(settings),
        "images": len(site.labels),
        "accuracy": last["val_accuracy"],
        "loss": last["val_loss"],
        "seconds": round(time.monotonic() - began, 1),
    }


def chosen(development: Iterable[Mapping[str, Any]], epsilon: float) -> dict[str, Any]:
    """The settings with the highest accuracy on held-back images; among equals the lower loss."""
    rows = [row for row in development if row["epsilon"] == epsilon]
    return dict(max(rows, key=lambda row: (row["accuracy"], -row["loss"]))["settings"])


def federation(
    job: tuple[str, str, int, float], plan: Plan, best: Mapping[float, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One partition of one data set with one ε: rows of every model and site."""
    name, kind, seed, epsilon = job
    begin(plan.products)
    data = plan.load(name)
    clients, owners, test = dealt(data, kind, seed)
    ctx = plan.context(data, f"{plan.model}_gn", plan.recipe, seed)
    alone = {client.name: own_model(client, ctx, None) for client in clients}
    found: list[tuple[float | None, str, dict[str, Predictor]]] = [(None, ALONE, alone)]
    if epsilon == plan.epsilons[0]:
        with_batchnorm = plan.context(data, plan.model, plan.recipe, seed)
        found.append((None, "the same with batch norm", {c.name: own_model(c, with_batchnorm, None) for c in clients}))
    noisy = replace(ctx, training=plan.with_noise(epsilon, best[epsilon]))  # one store: own models are trained once
    found.append((epsilon, NOISY, {client.name: as_sent(client, noisy) for client in clients}))
    for method in (*SHARED, *GATED):
        scope = method.replace(":", "-")
        found.append((epsilon, method, simulate(create(method), clients, replace(noisy, scope=scope))))
    rows = scored(found, data, clients, owners, test, plan.device, {"data": name, "partition": kind, "seed": seed})
    return [row for row in rows if row["model"] != ALONE or epsilon == plan.epsilons[0]]


def on_features(job: tuple[str, str, int], plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """The same for heads on a frozen encoder's features, for every ε: training alone is the slow part here."""
    name, kind, seed = job
    torch.set_num_threads(1)
    data = plan.load(name)
    clients, owners, test = dealt(data, kind, seed)
    ctx = replace(plan.context(data, "cnn", Training(), seed), store=Kept(folder / f"{name}-{kind}-{seed}"))
    seen = {"encoder": ENCODER, "encoder_size": max(ENCODER_SIZE, data.image_size), "projection": 256}
    view = {} if plan.drawn else seen

    def method(label: str, epsilon: float | None) -> Any:
        return create(label, {"analytic": {**view, "delta": DELTA, "epsilon": epsilon}}, quick=plan.drawn)

    found: list[tuple[float | None, str, dict[str, Predictor]]] = [
        (None, ALONE, {client.name: method("analytic:personal", None).alone(client, ctx) for client in clients})
    ]
    for epsilon in plan.epsilons:
        own = {}
        for client in clients:
            place = replace(ctx, scope=f"alone-{client.name}-{epsilon:g}")
            try:
                own |= simulate(method("analytic", epsilon), [client], place)
            except MethodError as error:
                if error.code != "no_images":  # too few of any class to be told from the noise: it has no such model
                    raise
        found.append((epsilon, NOISY, own))
        for label in ("analytic", "analytic:personal"):
            place = replace(ctx, scope=f"{label.replace(':', '-')}-{epsilon:g}")
            found.append((epsilon, label, simulate(method(label, epsilon), clients, place)))
    about = {"data": name, "partition": kind, "seed": seed}
    return scored(found, data, clients, owners, test, plan.device, about, ctx.store)


def as_sent(client: Client, ctx: Context) -> Predictor:
    """The network that leaves, used by its own site."""
    trained = ctx.local_model(client)
    return Predictor(ctx.task, (trained.architecture,), (trained.state,))


def scored(
    found: Sequence[tuple[float | None, str, Mapping[str, Predictor]]],
    data: Dataset,
    clients: Sequence[Client],
    owners: Mapping[str, int],
    test: protocols.TestSet,
    device: str,
    about: Mapping[str, Any],
    store: Store | None = None,
) -> list[dict[str, Any]]:
    """Accuracy of every model under two protocols, and image by image against the first one, training alone."""
    rows, alone = [], dict[str, np.ndarray]()
    for epsilon, model, predictors in found:
        answers = dict[int, np.ndarray]()
        for client in clients:
            predictor = predictors.get(client.name)
            if predictor is None:
                continue
            if id(predictor) not in answers:
                answers[id(predictor)] = predictor.probabilities(data.test.images, device, store=store)
            said = answers[id(predictor)]
            bar = alone.setdefault(client.name, said)
            counts = np.array(client.class_counts(len(data.classes)))
            right = said.argmax(1) == test.labels
            masks = protocols.subsets(test, owners[client.name], counts)
            row = {**about, "epsilon": epsilon, "model": model, "client": client.name, "images": len(client.labels)}
            for protocol in ("matched", "global"):
                mask = masks[protocol]
                against = protocols.compare(said[mask], bar[mask], test.labels[mask])
                accuracy = float(right[mask].mean()) if mask.any() else None
                row[protocol] = {"accuracy": accuracy, "against_alone": against}
            rows.append(row)
    return rows


@contextmanager
def processes(count: int) -> Iterator[Callable[[Callable[[T], R], Iterable[T]], Iterable[R]]]:
    """A `map` with so many processes: a small network alone leaves most of a GPU idle."""
    if count == 1:
        yield map
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over sites and seeds, and how many sites are better or worse off than alone beyond chance."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["partition"], row["model"], row["epsilon"]), []).append(row)
    out = []
    for (data, kind, model, epsilon), cells in groups.items():
        line: dict[str, Any] = {"data": data, "partition": kind, "model": model, "epsilon": epsilon}
        for protocol in ("matched", "global"):
            known = [cell[protocol] for cell in cells if cell[protocol]["accuracy"] is not None]
            line[protocol] = float(np.mean([cell["accuracy"] for cell in known]))
            ends = [cell["against_alone"]["interval"] for cell in known]
            line[f"{protocol}_better"] = sum(low > 0 for low, _ in ends)
            line[f"{protocol}_worse"] = sum(high < 0 for _, high in ends)
        out.append({**line, "sites": len(cells)})
    return out


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    titles = f"{'data':12} {'partition':10} {'model':26} {'ε':>4} {'matched':>8} {'global':>8}"
    print(f"{titles}  sites better/worse (matched)")
    for line in summary(rows):
        noise = "" if line["epsilon"] is None else f"{line['epsilon']:g}"
        print(
            f"{line['data']:12} {line['partition']:10} {line['model']:26} {noise:>4} {100 * line['matched']:8.1f} "
            f"{100 * line['global']:8.1f}  {line['matched_better']}/{line['matched_worse']} of {line['sites']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.private_training", description=__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--data", nargs="+", default=["bloodmnist", "dermamnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 4.0, 8.0])
    parser.add_argument("--epochs", type=int, default=20, help="of training alone")
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--partitions", nargs="+", choices=list(PARTITIONS), default=list(PARTITIONS))
    parser.add_argument("--images", type=int, help="of each site; else all that there are")
    parser.add_argument("--tests", type=int, help="test images; else all")
    parser.add_argument("--short", action="store_true", help="two settings to choose from, of five epochs: for a CPU")
    parser.add_argument("--features", type=Path, help="in place of networks, heads on features that are kept here")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no further seed that would end after them")
    parser.add_argument("--quick", action="store_true", help="drawn cells, one ε, one epoch: to try the script")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    began, grid = time.monotonic(), tuple(GRID)
    torch.set_num_threads(1)
    if given.short:
        grid = tuple({"epochs": 5, "batch_size": 64, "lr": lr} for lr in (0.1, 0.3))
    if given.quick:
        given.data, given.seeds, given.epsilons, given.epochs = given.data[:1], [0], [8.0], 1
        grid = tuple({"epochs": 1, "batch_size": 16, "lr": lr} for lr in (0.1, 0.3))
    sizes = {"drawn": given.quick, "images": given.images, "tests": given.tests}
    plan = Plan(given.data_dir, given.device, given.model, given.epochs, tuple(given.epsilons), grid, **sizes)
    out = given.out or RESULTS / ("dp-sgd.json" if given.features is None else "dp-features.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Any] = {"schema": 1, "delta": DELTA, "versions": versions(given.device), **sizes}
    with processes(given.jobs) as each:
        if given.features is None:
            plan, about = developed(plan, given.data[0], each)
            stored |= about
            best = {epsilon: about["chosen"][f"{epsilon:g}"] for epsilon in plan.epsilons}
            work, parts = partial(federation, plan=plan, best=best), [plan.epsilons]
            print(f"chosen after {time.monotonic() - began:.0f} s: {best}", flush=True)
        else:
            work, parts = partial(on_features, plan=plan, folder=given.features), []
        rows: list[dict[str, Any]] = []
        took = 0.0
        for seed in given.seeds:
            before = time.monotonic()
            if before + took - began > 60 * given.minutes:
                print(f"no time left for seed {seed}")
                break
            cells = list(product(given.data, given.partitions, [seed], *parts))
            rows += [row for cell in each(work, cells) for row in cell]
            took = time.monotonic() - before
            print(f"seed {seed}: {took:.0f} s", flush=True)
            stored |= {"rows": rows, "summary": summary(rows), "seconds": round(time.monotonic() - began)}
            out.write_text(json.dumps(stored, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    show(rows)
    print(f"{out.name}: {stored['seconds']} s")


def developed(plan: Plan, data: str, each: Callable[..., Iterable[Any]]) -> tuple[Plan, dict[str, Any]]:
    """The faster way for single gradients, the settings chosen for each ε, and what they were chosen by."""
    speed = {}
    if plan.device != "cpu":  # there convolutions are three times as fast
        speed = speeds(plan.model, plan.device, 256, 28)
        print(f"gradients of single images a second: {speed}", flush=True)
        plan = replace(plan, products=speed["products"] > speed["convolutions"])
    development = list(each(partial(tried, plan=plan, data_name=data), list(product(plan.epsilons, plan.grid))))
    return plan, {
        "model": plan.model,
        "training": plan.recipe.model_dump(),
        "gradients_per_second": speed,
        "products": plan.products,
        "developed_on": data,
        "development": development,
        "chosen": {f"{epsilon:g}": chosen(development, epsilon) for epsilon in plan.epsilons},
    }


if __name__ == "__main__":
    main()
