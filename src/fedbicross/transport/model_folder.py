"""What a site ends with: a folder with the model, its settings and its card.

::

    model/
      model.safetensors   the networks, in the same bytes as in a simulation
      config.json         task, preparation of images, origin, metrics, SHA-256 of the model
      MODEL_CARD.md       the same for people
      model.onnx          only if asked for
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbicross import __version__, evaluate, transport
from fedbicross.atomic import write_folder
from fedbicross.bundle import Limits, read_file, validate
from fedbicross.errors import ConfigError, MethodError, RunError, UploadError
from fedbicross.messages import Predictor

if TYPE_CHECKING:
    import numpy as np

SCHEMA = 1
WEIGHTS, SETTINGS, CARD, ONNX = "model.safetensors", "config.json", "MODEL_CARD.md", "model.onnx"
MAX_SETTINGS = 4 << 20  # bytes
PREPARATION = (
    "resized until the shorter side is image_size, centre square kept, values 0..255; "
    "the model itself maps them to -1..1"
)


@dataclass(frozen=True)
class Origin:
    """How a model came about, for its card."""

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


def score(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Every metric of one set of predictions, ready for JSON; None where a metric is undefined."""
    counts = evaluate.metrics.confusion(probabilities, labels)
    right = 0 if counts is None else int(counts.trace())
    interval = evaluate.metrics.wilson_interval(right, len(labels))
    return {
        "images": len(labels),
        "accuracy": evaluate.metrics.accuracy(probabilities, labels),
        "accuracy_interval": None if interval is None else list(interval),
        "balanced_accuracy": evaluate.metrics.balanced_accuracy(probabilities, labels),
        "macro_auc": evaluate.metrics.macro_auc(probabilities, labels),
        "macro_f1": evaluate.metrics.macro_f1(probabilities, labels),
        "ece": evaluate.metrics.expected_calibration_error(probabilities, labels),
        "confusion": None if counts is None else counts.tolist(),
    }


def write_model(
    out: Path, predictor: Predictor, origin: Origin, test: Mapping[str, Any] | None, onnx: bool = False
) -> None:
    """Write the folder, all or nothing; one that exists is never touched."""
    check_absent(out)
    data = predictor.pack()
    settings = {
        "schema": SCHEMA,
        "fedbicross": __version__,
        "task": predictor.task.as_json(),
        "networks": list(predictor.architectures),
        "combine": predictor.combine,
        "preparation": PREPARATION,
        "model_sha256": hashlib.sha256(data).hexdigest(),
        "origin": {**vars(origin)},
        "test": None if test is None else dict(test),
    }
    files = {
        WEIGHTS: data,
        SETTINGS: (json.dumps(settings, indent=1, sort_keys=True, allow_nan=False) + "\n").encode(),
        CARD: card(settings).encode(),
    }
    if onnx:
        files[ONNX] = as_onnx(predictor)
    try:
        write_folder(out, files)
    except OSError as error:
        raise RunError("cannot_write", f"cannot write {out}: {error.strerror or error}") from None


def check_absent(out: Path) -> None:
    """Nothing is replaced unasked."""
    if out.exists() or out.is_symlink():
        raise RunError("exists", f"{out} exists already; choose another --out, or remove it")


def load_model(path: str | Path) -> Predictor:
    """The verified model in a folder, or a ``model.safetensors`` alone: ``load_model(path).probabilities(images)``."""
    folder = Path(path)
    file = folder / WEIGHTS if folder.is_dir() else folder
    data = read_file(file)
    if folder.is_dir():
        expected = read_settings(folder)["model_sha256"]
        if hashlib.sha256(data).hexdigest() != expected:
            raise UploadError("digest", f"{file} is not the model that {SETTINGS} describes")
    predictor = Predictor.unpack(data)
    validate.check_predictor(predictor)
    return predictor


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``."""
    file = folder / SETTINGS
    try:
        found = json.loads(read_file(file, Limits(max_bytes=MAX_SETTINGS)))
        origin = found["origin"]
        usable = isinstance(found["model_sha256"], str), 0 <= origin["hold_out"] < 1, type(origin["seed"]) is int
        if found["schema"] != SCHEMA or not all(usable):
            raise ValueError
    except (UploadError, ValueError, KeyError, TypeError, RecursionError):
        raise UploadError("no_model", f"{folder} holds no model of fedbicross (no readable {SETTINGS})") from None
    return dict(found)


# --- the card ------------------------------------------------------------------------------------------------


def card(settings: Mapping[str, Any]) -> str:
    """The model card in Markdown."""
    task, origin = settings["task"], settings["origin"]
    networks = ", ".join(settings["networks"]) or "none: a constant answer"
    return f"""# Model card

**Not a medical device.** Research use only: not tested for any clinical purpose, not to be used for diagnosis,
treatment or triage.

## What it is

A classifier of {task["image_size"]} × {task["image_size"]} px images with {task["channels"]} channel(s), made for the
site {_text(origin["client"])} in the federation {_text(origin["run"])}.

- Classes, in the order of the outputs: {", ".join(_text(name) for name in task["classes"])}
- Networks: {networks}
- Method: {_text(origin["method"])}
- Trained here on {origin["train_images"]:,} images; fedbicross {settings["fedbicross"]}
- Preparation of images: {settings["preparation"]}

## How good it is

{_metrics(settings["test"])}

## What left the site

{_text(origin["leaves"])} {_sent(origin["upload_bytes"])}

## Privacy

- A trained network can give away something of the images it was trained on, such as whether a person was among them.
  The upload and this model are both such networks: handle them like patient data unless an audit says otherwise.
- Signatures prove who sent a file and that nobody changed it. They hide nothing.
- This model also holds something of the other sites: what the server made of their uploads.

## Use

```python
import fedbicross

fedbicross.load_model("{WEIGHTS}").probabilities(images)  # uint8 [n, H, W, C] -> [n, classes]
```
"""


def _sent(size: int | None) -> str:
    return "" if size is None else f"One file of {size:,} bytes was made to be sent."


def _metrics(test: Mapping[str, Any] | None) -> str:
    if not test:
        return "Not measured: the site held no images out. `fedbicross client evaluate` measures it."
    lines = "\n".join(f"| {name} | {value} |" for name, value in metric_rows(test))
    head = "| metric | value |\n|---|---|"
    return f"On {test['images']:,} images of this site that were not trained on:\n\n{head}\n{lines}"


def metric_rows(test: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The metrics of ``score`` in words, for a card or a terminal."""
    low, high = test["accuracy_interval"] or (None, None)
    return [
        ("accuracy", f"{_share(test['accuracy'])} (95 % interval {_share(low)} to {_share(high)})"),
        ("balanced accuracy", _share(test["balanced_accuracy"])),
        ("macro AUC", _plain(test["macro_auc"])),
        ("macro F1", _plain(test["macro_f1"])),
        ("expected calibration error", _plain(test["ece"])),
    ]


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"


def _plain(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _text(value: object) -> str:
    """A name as plain text: no markup, whatever it holds."""
    text = escape(" ".join(str(value).split()))
    for sign in "\\`*_[]|#":
        text = text.replace(sign, f"\\{sign}")
    return text


# --- ONNX ----------------------------------------------------------------------------------------------------


def as_onnx(predictor: Predictor) -> bytes:
    """The whole model, preparation of values and combination included: uint8 [n, H, W, C] to probabilities [n, C]."""
    if predictor.constant is not None:
        raise MethodError("no_network", "a constant answer has no network to export to ONNX")
    require_onnx()
    return transport.onnx_export.export(predictor)


def require_onnx() -> None:
    """Refuse early where the packages of the extra are missing."""
    if not all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript")):
        raise ConfigError("no_onnx", "ONNX export needs two more packages: pip install 'fedbicross[onnx]'")
