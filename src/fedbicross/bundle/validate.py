"""Does a bundle that parses also make sense? Pure checks; each refusal is an ``UploadError`` with a stable code."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from fedbicross import models
from fedbicross.bundle.format import Tensors, canonical_json, tensor_digest
from fedbicross.bundle.limits import NOT_REFERRED
from fedbicross.errors import ConfigError, UploadError
from fedbicross.lazy_torch import torch
from fedbicross.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Task
    from fedbicross.messages import Predictor, Upload

# How every network here sees a pixel x of 0..255. It stands in the manifest, so that a site that does otherwise shows.
PREPROCESSING = "(x/255-0.5)/0.5"

MAX_SAMPLES = 10**9  # images at one site
MAX_WEIGHT = 1e6  # magnitude of a weight or a running mean; trained networks stay below 1e3
MAX_VARIANCE = 1e12
MAX_BATCHES = 10**10
MAX_IMAGE_SIZE = 4096
MAX_TEMPERATURE = 100.0  # of a calibrated model, and its inverse
MAX_SHARE = 0.5  # of all images that one client may claim without being pointed out

Signature = tuple["torch.dtype", tuple[int, ...]]
ManifestT = TypeVar("ManifestT", bound=Settings)


# --- manifests ----------------------------------------------------------------------------------------------------


def read_manifest(cls: type[ManifestT], values: Mapping[str, Any]) -> ManifestT:
    """A manifest of exactly these fields and types."""
    try:
        return cls.model_validate_json(canonical_json(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:32] for part in first["loc"]) or "manifest"
        raise UploadError("manifest", f"{where!r}: {first['msg'].splitlines()[0]}") from None


def check_run(found: object, expected: str) -> None:
    """A bundle made for another run is a replay or a mix-up."""
    if found != expected:
        theirs = "no run" if found is None else f"run {str(found)[:64]!r}"
        raise UploadError("wrong_run", f"made for {theirs}, not for {expected!r}")


def check_client(found: object, expected: str) -> None:
    """A bundle of, or to, somebody else."""
    if found != expected:
        theirs = "nobody" if found is None else repr(str(found)[:64])
        raise UploadError("wrong_client", f"made for {theirs}, not for {expected!r}")


# --- networks -----------------------------------------------------------------------------------------------------


def check_model_state(
    tensors: Tensors,
    architecture: str,
    channels: int,
    classes: int,
    image_size: int,
    trained: bool = True,
    without: str = "",
) -> None:
    """The state of exactly this network, with finite values that training can have left behind.

    Not ``trained``: one that was computed from others, whose counters and variances may be zero. ``without``: how the
    names of a part begin that stays at home, e.g. ``head.``.
    """
    expected = model_tensors(architecture, channels, classes, image_size)
    if without:
        expected = {name: signature for name, signature in expected.items() if not name.startswith(without)}
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if found.keys() != expected.keys():
        _refuse_names(found, expected, architecture, channels, classes, image_size)
    _check_shapes(found, expected, architecture)
    for name, (dtype, _) in expected.items():
        if found[name][0] != dtype:
            raise UploadError("tensor_dtype", f"tensor {name!r} is {found[name][0]}, expected {dtype}")
    for name, tensor in tensors.items():
        _check_values(name, tensor, trained)


def model_tensors(architecture: str, channels: int, classes: int, image_size: int) -> dict[str, Signature]:
    """Name, type and shape of every tensor of a network, without taking memory for one."""
    check_image_size(image_size)
    try:
        models.check(architecture[:64], channels, classes, image_size)
    except ConfigError as error:
        raise UploadError("architecture", str(error.args[0])) from None
    return _skeleton(architecture, channels, classes, image_size)


def check_image_size(image_size: int) -> None:
    """Images of a size that memory can hold."""
    if not 1 <= image_size <= MAX_IMAGE_SIZE:
        raise UploadError("architecture", f"images of {_short(image_size)} px: 1 to {MAX_IMAGE_SIZE} are possible")


def _skeleton(architecture: str, channels: int, classes: int, image_size: int) -> dict[str, Signature]:
    return _built(architecture, channels, classes, image_size, torch.get_default_dtype())


@lru_cache(maxsize=64)
def _built(
    architecture: str, channels: int, classes: int, image_size: int, precision: torch.dtype
) -> dict[str, Signature]:
    """``precision`` is torch's default, with which networks are built here: one answer for each."""
    del precision
    with torch.device("meta"):
        model = models.factory.BUILDERS[architecture](channels, classes, image_size)
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}


def check_finite(tensors: Tensors) -> None:
    """No NaN and no infinity in any tensor, whatever it means."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            _bounds(name, tensor)


def check_matrix(tensors: Tensors, name: str, rows: int, max_columns: int) -> None:
    """A finite float32 matrix beside the network: so many rows, and 1 to ``max_columns`` columns."""
    if name not in tensors:
        raise UploadError("missing_tensor", f"the method needs a tensor {name!r}; it is not in the file")
    tensor = tensors[name]
    if tensor.dtype != torch.float32:
        raise UploadError("tensor_dtype", f"tensor {name!r} is {tensor.dtype}, expected torch.float32")
    if tensor.dim() != 2 or len(tensor) != rows or not 1 <= tensor.shape[1] <= max_columns:
        shape = tuple(tensor.shape)
        raise UploadError("tensor_shape", f"tensor {name!r} has shape {shape}, expected ({rows}, 1 to {max_columns})")
    _bounds(name, tensor)


def _table_bounds(tensor: Tensor, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """The lowest and the highest number of a table beside the networks: finite, of this shape."""
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise UploadError("tensor_shape", f"{name!r} is {found}, expected {shape}")
    return _bounds(name, tensor)


def check_shares(tensor: Tensor, name: str, shape: tuple[int, ...]) -> None:
    """Probabilities or weights: finite, none below zero."""
    if _table_bounds(tensor, name, shape)[0] < 0:
        raise UploadError("magnitude", f"{name!r} holds a number below zero")


def check_log_prior(tensor: Tensor, classes: int) -> None:
    """Logarithms of probabilities, one a class: finite, none above zero."""
    if _table_bounds(tensor, "log_prior", (classes,))[1] > 0:
        raise UploadError("magnitude", "'log_prior' holds a number above zero")


def check_referral(tensor: Tensor, classes: int) -> None:
    """Finite odds for each class, some of them `NOT_REFERRED` and some below it."""
    low, high = _table_bounds(tensor, "referral", (classes,))
    if high != NOT_REFERRED or low == NOT_REFERRED:
        raise UploadError("magnitude", f"'referral' does not hold odds below {NOT_REFERRED:g}, and that number, only")


def check_predictor(predictor: Predictor) -> None:
    """Every network of a model is one of its architecture, and every number beside them makes sense."""
    task, count = predictor.task, len(predictor.architectures)
    shape = (task.channels, len(task.classes), task.image_size)
    check_image_size(task.image_size)
    for architecture, state in zip(predictor.architectures, predictor.states, strict=True):
        if predictor.encoder is None:
            check_model_state(state, architecture, *shape, trained=False)
        else:  # a head: its sizes follow from its tensors, so that building one checks them
            models.heads.load(architecture, state, len(task.classes))
            check_finite(state)
    if predictor.constant is not None:
        check_shares(predictor.constant, "constant", (len(task.classes),))
    if predictor.class_weights is not None:
        check_shares(predictor.class_weights, "class_weights", (count, len(task.classes)))
    elif predictor.combine in ("class_weighted", "consensus"):
        raise UploadError(
            "missing_tensor", "the model combines its networks by class weights; they are not in the file"
        )
    if predictor.log_prior is not None:
        check_log_prior(predictor.log_prior, len(task.classes))
    if predictor.referral is not None:
        check_referral(predictor.referral, len(task.classes))
    if not 1 / MAX_TEMPERATURE <= predictor.temperature <= MAX_TEMPERATURE:
        raise UploadError("magnitude", f"a temperature of {predictor.temperature:g} is none of a calibrated model")
    if not count and predictor.constant is None:
        raise UploadError("missing_tensor", "the model holds neither a network nor a constant answer")


def _refuse_names(
    found: Mapping[str, Signature], expected: Mapping[str, Signature], architecture: str, *shape: int
) -> None:
    for other in models.MODELS:
        if other != architecture and _skeleton(other, *shape).keys() == found.keys():
            raise UploadError("architecture", f"these are the weights of a {other}, not of a {architecture}")
    missing = [name for name in expected if name not in found]
    if missing:
        raise UploadError("missing_tensor", f"a {architecture} has a tensor {missing[0]!r}; it is not in the file")
    extra = next(name for name in found if name not in expected)
    raise UploadError("extra_tensor", f"a {architecture} has no tensor {extra[:64]!r}, or not one to send")


def _check_shapes(found: Mapping[str, Signature], expected: Mapping[str, Signature], architecture: str) -> None:
    wrong = [name for name in expected if found[name][1] != expected[name][1]]
    if not wrong:
        return
    first = next(iter(expected))
    theirs, ours = found[wrong[0]][1], expected[wrong[0]][1]
    if set(wrong) <= {"head.weight", "head.bias"} and len(theirs) == len(ours) and theirs[1:] == ours[1:]:
        raise UploadError("class_count", f"the network tells {theirs[0]} classes apart, expected {ours[0]}")
    if wrong == [first] and len(theirs) == len(ours) and theirs[:1] + theirs[2:] == ours[:1] + ours[2:]:
        raise UploadError("channels", f"the network takes images of {theirs[1]} channels, expected {ours[1]}")
    if 2 * len(wrong) > len(expected) - sum(not shape for _, shape in expected.values()):
        raise UploadError("width", f"most tensors have another shape than in a {architecture}: other layer widths")
    raise UploadError("tensor_shape", f"tensor {wrong[0]!r} has shape {theirs}, expected {ours}")


def _check_values(name: str, tensor: Tensor, trained: bool) -> None:
    if name.endswith("num_batches_tracked"):
        count = int(tensor)
        if not int(trained) <= count <= MAX_BATCHES:
            raise UploadError("counter", f"{name!r} is {count}: the network was not trained, or not like this")
        return
    low, high = _bounds(name, tensor)
    if name.endswith("running_var"):
        if low < 0 or (trained and low == 0):
            raise UploadError("variance", f"{name!r} holds {low:g}: a variance must be positive")
        if high > MAX_VARIANCE:
            raise UploadError("magnitude", f"{name!r} holds {high:g}: over the limit of {MAX_VARIANCE:g}")
    elif max(-low, high) > MAX_WEIGHT:
        raise UploadError("magnitude", f"{name!r} holds {max(-low, high):g}: over the limit of {MAX_WEIGHT:g}")


def _bounds(name: str, tensor: Tensor) -> tuple[float, float]:
    low, high = (float(value) for value in tensor.aminmax())  # NaN wins over every number; no mask in memory
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UploadError("non_finite", f"tensor {name!r} holds NaN or infinity")
    return low, high


# --- counts -------------------------------------------------------------------------------------------------------


def check_numbers(upload: Upload) -> None:
    """Whatever numbers of images an upload states, for any method: whole (True is none), and not absurd."""
    size = upload.num_samples
    if size is not None and (type(size) is not int or not 1 <= size <= MAX_SAMPLES):
        raise UploadError("num_samples", f"{_short(size)} is no number of training images")
    counts = upload.class_counts or ()
    if any(type(count) is not int or not 0 <= count <= MAX_SAMPLES for count in counts) or sum(counts) > MAX_SAMPLES:
        raise UploadError("class_counts", "a class count is not a whole, plausible number of images")


def check_class_counts(counts: Sequence[int] | None, classes: int, num_samples: int | None = None) -> None:
    """Whole, plausible numbers of images: per class, in all, and in agreement with each other."""
    if num_samples is not None and (type(num_samples) is not int or not 1 <= num_samples <= MAX_SAMPLES):
        raise UploadError("num_samples", f"{_short(num_samples)} is no number of training images")
    if counts is None:
        return
    if len(counts) != classes:
        raise UploadError("class_counts", f"{len(counts)} class counts for {classes} classes")
    if any(type(count) is not int or count < 0 for count in counts):
        raise UploadError("class_counts", "a class count is not a whole number of images")
    if not 1 <= sum(counts) <= MAX_SAMPLES:
        raise UploadError("class_counts", f"class counts that add up to {_short(sum(counts))} images")
    if num_samples is not None and sum(counts) != num_samples:
        raise UploadError("class_counts", f"class counts add up to {sum(counts)}, not to {num_samples} images")


# --- between clients ----------------------------------------------------------------------------------------------


def check_same_task(uploads: Sequence[Upload], expected: Task | None = None) -> None:
    """Label map, image size, channels and preprocessing must be the same everywhere (the network may differ)."""
    if not uploads:
        return
    task, whose = (uploads[0].task, repr(uploads[0].client[:64])) if expected is None else (expected, "the federation")
    for upload in uploads:
        for what in ("classes", "image_size", "channels"):
            theirs, ours = getattr(upload.task, what), getattr(task, what)
            if theirs != ours:
                _refuse_task(upload.client, what, theirs, ours, whose)
        if upload.preprocessing != PREPROCESSING:
            _refuse_task(upload.client, "preprocessing", upload.preprocessing, PREPROCESSING, "this version")


def flag_suspicious(uploads: Sequence[Upload], init: Tensors | None = None) -> list[tuple[str, str]]:
    """Whom a person should look at before fusing, and why: copies, untrained networks, claims of most of the data."""
    flags = []
    first_with: dict[str, str] = {}
    total = sum(images_claimed(upload) for upload in uploads)
    for upload in uploads:
        name, found = repr(upload.client[:64]), []
        if upload.tensors:
            digest = _content(upload.tensors)
            if digest in first_with:
                found.append(f"sent the same tensors as {first_with[digest]}")
            first_with.setdefault(digest, name)
            found += [f"sent {problem}" for problem in _untrained(upload.tensors, init)]
        if len(uploads) > 2 and images_claimed(upload) > MAX_SHARE * total:
            found.append(f"claims {images_claimed(upload) / total:.0%} of all images")
        flags += [(upload.client, f"{name} {what}") for what in found]
    return flags


def _untrained(tensors: Tensors, init: Tensors | None) -> list[str]:
    found = []
    weights = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if init is not None and all(name in init and torch.equal(value, init[name]) for name, value in weights.items()):
        found.append("the shared initial network, untrained")
    means = [value for name, value in weights.items() if name.endswith("running_mean")]
    variances = [value for name, value in weights.items() if name.endswith("running_var")]
    still = all(float(m.abs().max()) < 1e-6 for m in means) and all(
        float((v - 1).abs().max()) < 1e-6 for v in variances
    )
    if means and variances and still:
        found.append("a network whose batch-normalisation statistics never moved")
    head = tensors.get("head.weight")
    if head is not None and bool((head == head[:1]).all()):
        found.append("a network whose last layer cannot tell classes apart: one answer to every image")
    return found


def _content(tensors: Tensors) -> str:
    """One digest of names, types, shapes and bytes, in any order."""
    lines = sorted(f"{name} {tensor_digest(tensor)}" for name, tensor in tensors.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def images_claimed(upload: Upload) -> int:
    """How many images a site says it has, by whichever of its numbers is larger."""
    return max(upload.num_samples or 0, sum(upload.class_counts or ()))


def _refuse_task(client: str, what: str, theirs: object, ours: object, whose: str) -> None:
    raise UploadError(f"task_{what}", f"{client[:64]!r} has {what} {_short(theirs)}, {whose} has {_short(ours)}")


def _short(value: object) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 10**18 else "an absurd number of"
    return text if len(text) <= 60 else text[:57] + "..."
