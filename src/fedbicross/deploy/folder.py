"""A finished model as a folder, laid out as on the Hugging Face hub; its tensors are plain safetensors.

::

    model/
      model.safetensors         the networks, how they are combined, and the temperature of their probabilities
      alone.safetensors         of a site: what it would have alone, to compare and to fall back on
      config.json               task, origin, metrics of both, SHA-256 of both
      preprocessor_config.json  how images become inputs, in the words of the hub
      MODEL_CARD.md             the same for people (README.md in an export, which is the hub's name for it)
      model.onnx, model.pt2     only if asked for
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbicross import __version__, deploy
from fedbicross.atomic import write_folder
from fedbicross.bundle import Limits, read_file, validate
from fedbicross.errors import ConfigError, RunError, UploadError
from fedbicross.messages import Predictor

if TYPE_CHECKING:
    from fedbicross.context import Task

SCHEMA = 2
WEIGHTS, OWN, SETTINGS, PROCESSOR = "model.safetensors", "alone.safetensors", "config.json", "preprocessor_config.json"
CARD, HUB_CARD, ONNX, TORCH = "MODEL_CARD.md", "README.md", "model.onnx", "model.pt2"
MAX_SETTINGS = 4 << 20  # bytes
PREPARATION = (
    "resized until the shorter side is image_size, centre square kept, values 0..255; "
    "the model itself maps them to -1..1"
)


@dataclass(frozen=True)
class Origin:
    """How a model came about, for its card."""

    kind: str  # federation or run
    client: str
    run: str
    method: str
    leaves: str  # what left the site, in the method's words
    upload_bytes: int | None  # None: not known on this machine
    train_images: int
    hold_out: float
    seed: int
    settings: Mapping[str, Any]
    training: Mapping[str, Any]
    reply_sha256: str | None = None  # of the reply that it was made from, in a federation
    notes: list[str] = field(default_factory=list)  # of the server, on the uploads behind its reply
    privacy: Mapping[str, str | None] | None = None  # of the upload, and of all that the site ever sent, in words


@dataclass(frozen=True)
class Finished:
    """A model and all that its folder says of it."""

    model: Predictor
    origin: Origin
    alone: Predictor | None = None  # what the site would have without taking part
    calibration_images: int = 0  # 0: not calibrated
    scores: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(("test", "alone", "comparison")))

    def settings(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        model, task = self.model, self.model.task
        names = dict(enumerate(task.classes))
        return {
            "schema": SCHEMA,
            "fedbicross": __version__,
            "model_type": "fedbicross",
            "id2label": {str(number): name for number, name in names.items()},
            "label2id": {name: number for number, name in names.items()},
            "task": task.as_json(),
            "networks": list(model.architectures),
            "combine": model.combine,
            "temperature": model.temperature,
            "calibration_images": self.calibration_images,
            "preparation": PREPARATION,
            "model_sha256": _sha256(model.pack()),
            "alone_sha256": None if self.alone is None else _sha256(self.alone.pack()),
            "origin": {**vars(self.origin)},
            **self.scores,
        }


def write_model(out: Path, finished: Finished, card: str = CARD, onnx: bool = False, torch: bool = False) -> None:
    """Write the folder, all or nothing; one that exists is never touched."""
    check_absent(out)
    settings = finished.settings()
    files = {
        WEIGHTS: finished.model.pack(),
        SETTINGS: _json(settings),
        PROCESSOR: _json(processor(finished.model.task)),
        card: deploy.card.card(settings).encode(),
    }
    if finished.alone is not None:
        files[OWN] = finished.alone.pack()
    if onnx:
        files[ONNX] = deploy.graphs.as_onnx(finished.model)
    if torch:
        files[TORCH] = deploy.graphs.as_torch(finished.model)
    try:
        write_folder(out, files)
    except OSError as error:
        raise RunError("cannot_write", f"cannot write {out}: {error.strerror or error}") from None


def processor(task: Task) -> dict[str, Any]:
    """The preparation of images as an image processor of the hub spells it; 3 is bicubic."""
    side = {"height": task.image_size, "width": task.image_size}
    return {
        "do_resize": True,
        "size": {"shortest_edge": task.image_size},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": side,
        "do_convert_rgb": task.channels == 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * task.channels,
        "image_std": [0.5] * task.channels,
    }


def check_absent(out: Path) -> None:
    """Nothing is replaced unasked."""
    if out.exists() or out.is_symlink():
        raise RunError("exists", f"{out} exists already; choose another --out, or remove it")


def written_before(out: Path, reply: bytes, client: str, onnx: bool) -> dict[str, Any] | None:
    """The settings of a folder that holds the model which this client made of this reply; None for any other."""
    if not (out / SETTINGS).is_file() or (onnx and not (out / ONNX).is_file()):
        return None
    settings = read_settings(out)
    if (settings["origin"]["client"], settings["origin"].get("reply_sha256")) != (client, _sha256(reply)):
        return None
    load_model(out)  # whatever is wrong with it is said
    return settings


def load_model(path: str | Path, alone: bool = False) -> Predictor:
    """The verified model in a folder, or a ``model.safetensors`` alone: ``load_model(path).probabilities(images)``.

    ``alone``: the other model of the folder, which the site trained without the others.
    """
    folder = Path(path)
    file = folder / (OWN if alone else WEIGHTS) if folder.is_dir() else folder
    expected = None
    if folder.is_dir():
        expected = read_settings(folder)["alone_sha256" if alone else "model_sha256"]
    if alone and expected is None:
        raise ConfigError("no_model_alone", f"{path} holds no model that a site trained alone")
    data = read_file(file)
    if expected is not None and _sha256(data) != expected:
        raise UploadError("digest", f"{file} is not the model that {SETTINGS} describes")
    return checked(data)


def checked(data: bytes) -> Predictor:
    """The model in these bytes, if it is one."""
    predictor = Predictor.unpack(data)
    validate.check_predictor(predictor)
    return predictor


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``."""
    file = folder / SETTINGS
    try:
        found = json.loads(read_file(file, Limits(max_bytes=MAX_SETTINGS)), parse_constant=_no_number)
        origin, digests = found["origin"], (found["model_sha256"], found["alone_sha256"] or "")
        usable = *(isinstance(text, str) for text in digests), 0 <= origin["hold_out"] < 1, type(origin["seed"]) is int
        if found["schema"] != SCHEMA or not all(usable):
            raise ValueError
        Origin(**origin)
        deploy.card.card(found)  # whatever is asked of it later can be shown
    except (UploadError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise UploadError("no_model", f"{folder} holds no model of fedbicross (no readable {SETTINGS})") from None
    return dict(found)


def read_finished(folder: Path) -> Finished:
    """A folder read back whole, to be exported again."""
    settings = read_settings(folder)
    alone = load_model(folder, alone=True) if settings["alone_sha256"] else None
    scores = {key: settings[key] for key in ("test", "alone", "comparison")}
    origin = Origin(**settings["origin"])
    return Finished(load_model(folder), origin, alone, settings["calibration_images"], scores)


def own_model(finished: Finished) -> Finished:
    """The model that the site trained alone, in the place of the federated one."""
    if finished.alone is None:
        raise ConfigError("no_model_alone", "this folder holds no model that a site trained alone")
    origin = replace(
        finished.origin, method="trained alone", leaves="Nothing.", upload_bytes=None, notes=[], privacy=None
    )
    scores = {"test": finished.scores["alone"], "alone": None, "comparison": None}
    return replace(finished, model=finished.alone, alone=None, origin=origin, scores=scores)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
