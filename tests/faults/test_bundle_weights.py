"""Family C: bundles that parse and are signed, but whose content must not pass, or must be pointed out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from faults.toy_bundle import ALLOWED, FEDERATION, RUN, TASK, key, receive, refusal, toy_upload, trained_like
from fedbicross.bundle import sign, validate
from fedbicross.bundle.format import canonical_json, pack
from fedbicross.context import Context, Task
from fedbicross.errors import FedBiCrossError, MethodError, UploadError
from fedbicross.messages import Upload
from fedbicross.methods import create
from fedbicross.methods.base import check_needs
from fedbicross.transport import files
from small import packed_unchecked, refuses, tiny_context

RESNET8 = ("resnet8", 3, 3, 12)
RESNET18 = ("resnet18", 3, 8, 28)


def resnet8(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**trained_like("resnet8"), **changes}


def network(tensors: dict[str, torch.Tensor] | None = None, client: str = "north", **changes: Any) -> Upload:
    """An upload that every method that takes a network accepts, but for the changes."""
    values = {"num_samples": 9, "class_counts": [4, 3, 2], "run_id": RUN, "agreement": FEDERATION.agreement, **changes}
    return Upload(client, values.pop("task", TASK), tensors or resnet8(), **values)


def through_the_door(upload: Upload, method: str = "fedavg") -> Upload:
    """Signed, sent, verified, decoded and checked."""
    received = receive(sign(packed_unchecked(upload), key(upload.client)), upload.client)
    create(method).check_upload(received)
    return received


def test_a_good_network_passes() -> None:
    assert through_the_door(network()).pack() == network().pack()


# --- 15: not finite -----------------------------------------------------------------------------------------------


def test_every_placement_of_nan_and_infinity() -> None:
    """102 floating-point tensors of ResNet-18 × NaN, +Inf, -Inf, at 306 random places; the tensor is named."""
    state = {name: value.clone() for name, value in trained_like("resnet18", 8, 3, 28).items()}
    validate.check_model_state(state, *RESNET18)
    rng, cases = random.Random(15), 0
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            continue
        for bad in (float("nan"), float("inf"), float("-inf")):
            place = rng.randrange(tensor.numel())
            flat = tensor.view(-1)
            good, flat[place] = flat[place].clone(), bad
            with refuses(UploadError, "non_finite", name.replace(".", r"\.")):
                # The order of tensors is free; this one first, or 306 cases read 14 GB.
                validate.check_model_state({name: tensor, **state}, *RESNET18)
            flat[place], cases = good, cases + 1
    assert cases == 306
    validate.check_model_state(state, *RESNET18)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_through_the_door(bad: float) -> None:
    weight = trained_like("resnet8")["head.weight"].clone()
    weight[1, 2] = bad
    assert refusal(lambda: through_the_door(network(resnet8(**{"head.weight": weight})))) == "non_finite"
    assert refusal(lambda: validate.check_finite({"w": torch.tensor([bad])})) == "non_finite"


# --- 16: batch normalisation --------------------------------------------------------------------------------------


def test_impossible_statistics_in_every_layer() -> None:
    cases = Counter[str]()
    bad_values: dict[str, list[tuple[float, str]]] = {
        "running_var": [(-1e-6, "variance"), (0.0, "variance"), (1e30, "magnitude")],
        "running_mean": [(1e30, "magnitude"), (-1e30, "magnitude")],
        "num_batches_tracked": [(0, "counter"), (-1, "counter"), (2**62, "counter")],
        "weight": [(1e30, "magnitude"), (-1e7, "magnitude")],
    }
    for name, tensor in trained_like("resnet8").items():
        for value, code in bad_values.get(name.rpartition(".")[2], []):
            changed = tensor.clone()
            changed.view(-1)[-1] = value
            state = {name: changed, **resnet8(**{name: changed})}
            assert refusal(lambda state=state: validate.check_model_state(state, *RESNET8)) == code, (name, value)
            cases[code] += 1
    assert cases == {"variance": 18, "magnitude": 9 + 18 + 2 * 19, "counter": 27}


# --- 17: missing statistics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "ensemble", "fedisca", "e_fedisca", "fedbicross", "primum"])
def test_each_missing_buffer_of_each_layer(method: str) -> None:
    buffers = [n for n in trained_like("resnet8") if n.endswith(("running_var", "running_mean", "num_batches_tracked"))]
    assert len(buffers) == 27
    for name in buffers:
        upload = network({n: t for n, t in resnet8().items() if n != name})
        assert refusal(lambda upload=upload: create(method).check_upload(upload)) == "missing_tensor", name


def test_a_network_without_batch_normalisation() -> None:
    """Methods that need the statistics say so; averaging and ensembles do without."""
    upload = network(dict(trained_like("cnn")), task=replace(TASK, model="cnn"))
    for name in ("fedisca", "e_fedisca", "fedbicross", "primum"):
        method = create(name)
        assert refusal(lambda method=method: check_needs(method, [upload]), MethodError) == "needs_bn_stats"
    for name in ("fedavg", "ensemble"):
        check_needs(create(name), [upload])
        create(name).check_upload(upload)
        assert len(create(name).fuse([upload, upload], Context(upload.task))) == 2


# --- 18: another architecture -------------------------------------------------------------------------------------


def wrong_networks() -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    good = resnet8()
    first = next(iter(good))
    return {
        "missing key": ({n: t for n, t in good.items() if n != "head.bias"}, "missing_tensor"),
        "extra key": ({**good, "head.scale": torch.ones(1)}, "extra_tensor"),
        "a device name": ({**good, "con": torch.ones(1)}, "extra_tensor"),
        "transposed kernel": ({**good, first: good[first].transpose(0, 1).contiguous()}, "tensor_shape"),
        "flat kernel": ({**good, first: good[first].flatten()}, "tensor_shape"),
        "other depth": ({**good, **{n.replace("stage3.0", "stage3.1"): t for n, t in good.items()}}, "extra_tensor"),
        "other architecture": (dict(trained_like("vgg8")), "architecture"),
        "other width": ({n: t if t.dim() == 0 else t.repeat_interleave(2, 0) for n, t in good.items()}, "width"),
        "other class count": (dict(trained_like("resnet8", classes=4)), "class_count"),
        "other input channels": (dict(trained_like("resnet8", channels=1)), "channels"),
        "double precision": ({n: t.double() for n, t in good.items()}, "tensor_dtype"),
        "half precision": ({**good, "head.weight": good["head.weight"].half()}, "tensor_dtype"),
        "bfloat16": ({**good, "head.weight": good["head.weight"].bfloat16()}, "tensor_dtype"),
        "whole-number weights": ({**good, "head.weight": good["head.weight"].long()}, "tensor_dtype"),
        "boolean weights": ({**good, "head.weight": good["head.weight"] > 0}, "tensor_dtype"),
        "nothing": ({}, "missing_tensor"),
    }


@pytest.mark.parametrize("case", wrong_networks())
def test_another_architecture(case: str) -> None:
    tensors, code = wrong_networks()[case]
    upload = replace(network(), tensors=tensors)
    assert refusal(lambda: through_the_door(upload)) == code


def test_other_depth_is_recognised_by_name() -> None:
    upload = network(dict(trained_like("resnet34")), task=replace(TASK, model="resnet18"))
    with refuses(UploadError, "architecture", "these are the weights of a resnet34, not of a resnet18"):
        create("fedavg").check_upload(upload)


@pytest.mark.parametrize(
    "task",
    [
        replace(TASK, model="resnet19"),
        replace(TASK, model="../../etc/passwd"),
        replace(TASK, model="os.system"),
        replace(TASK, model=""),
        replace(TASK, image_size=4),
        replace(TASK, image_size=10**9),
        replace(TASK, image_size=-1),
        replace(TASK, channels=2),
        replace(TASK, channels=0),
        replace(TASK, classes=("a",)),
        replace(TASK, classes=()),
    ],
    ids=range(11),
)
def test_a_task_that_no_network_fits(task: Task) -> None:
    upload = network(task=task, class_counts=None)
    assert refusal(lambda: through_the_door(upload)).startswith("task_"), "no federation agrees on it"
    assert refusal(lambda: create("fedavg").check_upload(upload)) == "architecture"


def test_methods_that_take_no_network_take_no_tensors() -> None:
    for name in ("majority", "local_only"):
        create(name).check_upload(Upload("a", TASK))
        assert refusal(lambda name=name: create(name).check_upload(network())) == "extra_tensor"


@pytest.mark.parametrize("case", ["missing", "rows", "columns", "vector", "type", "nan"])
def test_a_second_tensor_that_a_method_asks_for(case: str) -> None:
    method = create("fedbicross", {"fedbicross": {"clustering": "pacfl"}})
    good = torch.rand(3 * 12 * 12, 6)
    method.check_upload(network(resnet8(**{"pacfl.signature": good})))
    bad = {
        "rows": good[1:],
        "columns": torch.rand(432, 10),
        "vector": good[:, 0],
        "type": good.double(),
        "nan": good * float("nan"),
    }
    code = {"missing": "missing_tensor", "type": "tensor_dtype", "nan": "non_finite"}.get(case, "tensor_shape")
    upload = network(resnet8(**({"pacfl.signature": bad[case]} if case in bad else {})))
    assert refusal(lambda: method.check_upload(upload)) == code
    assert refusal(lambda: create("fedbicross").check_upload(network(resnet8(**{"pacfl.signature": good})))) == (
        "extra_tensor"
    )


# --- 19: sites that disagree --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"classes": ("a", "c", "b")}, "classes"),
        ({"classes": ("a", "b", "C")}, "classes"),
        ({"classes": ("a", "b")}, "classes"),
        ({"image_size": 28}, "image_size"),
        ({"channels": 1}, "channels"),
    ],
)
def test_sites_that_disagree(change: dict[str, Any], field: str) -> None:
    ours, theirs = toy_upload("north"), replace(toy_upload("south"), task=replace(TASK, **change))
    for uploads, expected in (([ours, theirs], None), ([theirs], TASK), ([ours, ours, theirs], TASK)):
        with refuses(UploadError, f"task_{field}", rf"'south' has {field}"):
            validate.check_same_task(uploads, expected)


def test_other_preprocessing() -> None:
    theirs = toy_upload("south", preprocessing="x/255")
    assert refusal(lambda: validate.check_same_task([toy_upload(), theirs])) == "task_preprocessing"
    assert refusal(lambda: validate.check_same_task([theirs], TASK)) == "task_preprocessing"


def test_sites_that_agree_may_use_other_networks() -> None:
    validate.check_same_task([])
    validate.check_same_task([toy_upload(), replace(toy_upload("south"), task=replace(TASK, model="cnn"))], TASK)


# --- 20: suspicious but possible ----------------------------------------------------------------------------------


def moved(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        n: t + 0.1 * torch.rand(t.shape, generator=rng) if t.is_floating_point() else t for n, t in resnet8().items()
    }


def test_honest_uploads_raise_no_flag() -> None:
    uploads = [network(moved(i), name) for i, name in enumerate(ALLOWED)]
    assert validate.flag_suspicious(uploads, trained_like("resnet8")) == []
    assert validate.flag_suspicious([Upload("a", TASK), Upload("b", TASK)]) == [], "nothing twice is no copy"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensors": moved(0)}, "'south' sent the same tensors as 'north'"),
        ({"tensors": resnet8()}, "'south' sent the shared initial network"),
        ({"tensors": resnet8()}, "'south' sent a network whose batch-normalisation statistics never moved"),
        (
            {"tensors": {**moved(1), "head.weight": torch.zeros(3, 64)}},
            "'south' sent a network whose last layer cannot",
        ),
        ({"tensors": {**moved(1), "head.weight": torch.ones(3, 64)}}, "'south' sent a network whose last layer"),
        ({"tensors": moved(1), "num_samples": 10**6}, "'south' claims 100% of all images"),
        ({"tensors": moved(1), "num_samples": None, "class_counts": [90, 0, 9]}, "'south' claims 85% of all images"),
        ({"tensors": moved(1), "num_samples": 1, "class_counts": [90, 0, 9]}, "'south' claims 85% of all images"),
    ],
)
def test_flags(changes: dict[str, Any], words: str) -> None:
    uploads = [network(moved(0), "north"), network(client="south", **changes), network(moved(2), "west")]
    flags = validate.flag_suspicious(uploads, trained_like("resnet8"))
    assert any(text.startswith(words) for _, text in flags), flags
    assert {client for client, _ in flags} == {"south"}


# --- 21: counts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, -1, 10**12, 10**30])
def test_number_of_samples(samples: int) -> None:
    assert refusal(lambda: through_the_door(network(num_samples=samples, class_counts=None))) == "num_samples"


@pytest.mark.parametrize(
    "counts", [[1, 2], [4, 3, 2, 0], [], [-1, 5, 5], [0, 0, 0], [10**12, 0, 0], [4, 3, 3], [4, 3, 1], [10**40, 0, 0]]
)
def test_class_counts(counts: list[int]) -> None:
    assert refusal(lambda: through_the_door(network(class_counts=counts))) == "class_counts"


@pytest.mark.parametrize("value", [1.5, 9.0, "9", True, [9], {}, float("1e300")])
@pytest.mark.parametrize("field", ["num_samples", "class_counts"])
def test_counts_that_are_not_whole_numbers(field: str, value: Any) -> None:
    upload = network(num_samples=None, class_counts=None)
    object.__setattr__(upload, field, value if field == "num_samples" else [value, 1, 1])
    assert refusal(lambda: receive(sign(upload.pack(), key("north")))) == "manifest"
    if not isinstance(value, list | dict):
        assert refusal(lambda: validate.check_class_counts([value, 1, 1], 3)) == "class_counts"
        assert refusal(lambda: validate.check_class_counts(None, 3, value)) == "num_samples"


def test_counts_at_the_limits() -> None:
    validate.check_class_counts(None, 3)
    validate.check_class_counts([0, 1, 0], 3, 1)
    validate.check_class_counts([validate.MAX_SAMPLES, 0, 0], 3, validate.MAX_SAMPLES)


# --- manifests of a site that holds a valid key -------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "client": "north",
    "task": TASK.as_json(),
    "preprocessing": validate.PREPROCESSING,
    "class_counts": [4, 3, 2],
    "num_samples": 9,
    "extra": {},
    "run_id": RUN,
    "agreement": FEDERATION.agreement.model_dump(),
}
STRANGE: list[Any] = [None, True, -1, 10**30, 0.5, "", "x" * 5000, "\0", [], [1], {}, {"a": 1}, [[[[[]]]]], "__class__"]


def test_a_site_with_a_key_cannot_crash_the_server() -> None:
    """Every field of a signed manifest missing, or with every strange value: fused or refused, no traceback."""
    state, method, ctx = resnet8(), create("fedavg"), tiny_context()
    fields = [("", name) for name in GOOD] + [("task", name) for name in TASK.as_json()]
    outcomes = Counter[str]()
    for group, name in fields:
        for value in [*STRANGE, "delete", "add"]:
            info = {**GOOD, "task": dict(GOOD["task"])}
            place = info[group] if group else info
            if value == "delete":
                del place[name]
            else:
                place["more" if value == "add" else name] = value
            data = sign(pack("upload", state, info), key("north"))
            try:
                upload = files.verify_upload(FEDERATION, data)
                method.fuse([upload, upload], ctx)
                outcomes["accepted"] += 1
                assert canonical_json({"v": value}) in ('{"v":null}', '{"v":{}}')
            except FedBiCrossError as error:
                assert len(error.args[0].splitlines()) == 1
                outcomes[error.code] += 1
    assert outcomes.total() == len(fields) * (len(STRANGE) + 2) == 192
    assert outcomes["manifest"] > 90
