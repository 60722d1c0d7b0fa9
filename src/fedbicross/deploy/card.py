"""The model card: what a model is, how good it is and whether taking part helped, what left, in Markdown for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedbicross.deploy import compare

# What the Hugging Face hub reads at the top of a card. Nothing in it comes from a user.
HEAD = """---
library_name: fedbicross
pipeline_tag: image-classification
tags:
- federated-learning
- medical-imaging
---
"""


def card(settings: Mapping[str, Any]) -> str:
    """The card of the model that ``config.json`` describes."""
    task, origin = settings["task"], settings["origin"]
    networks = ", ".join(settings["networks"]) or "none: a constant answer"
    return f"""{HEAD}
# Model card

**Not a medical device.** Research use only: not tested for any clinical purpose, not to be used for diagnosis,
treatment or triage.

## What it is

A classifier of {task["image_size"]} × {task["image_size"]} px images with {task["channels"]} channel(s), made for the
site {_text(origin["client"])} in {_where(origin)}.

- Classes, in the order of the outputs: {", ".join(_text(name) for name in task["classes"])}
- Networks: {networks}
- Method: {_text(origin["method"])}
- Trained here on {origin["train_images"]:,} images; fedbicross {settings["fedbicross"]}
- Preparation of images: {settings["preparation"]}
- Probabilities: {_calibration(settings)}

## How good it is

{_metrics(settings)}

## Did taking part help?

{_comparison(settings)}

{_noted(origin.get("notes", ()))}## What left the site

{_text(origin["leaves"])} {_sent(origin["upload_bytes"])}

## Privacy

{_private(origin.get("privacy"))}- A trained network can give away something of the images it was trained on, such
  as whether a person was among them.
  The upload and this model are both such networks: handle them like patient data unless an audit says otherwise.
- Signatures prove who sent a file and that nobody changed it. They hide nothing.
- This model also holds something of the other sites: what the server made of their uploads.

## Use

```bash
fedbicross predict IMAGES --model THIS_FOLDER --out answers.csv
```

```python
import fedbicross

fedbicross.load_model("THIS_FOLDER").probabilities(images)  # uint8 [n, H, W, C] -> [n, classes]
```
"""


def _noted(notes: Sequence[str]) -> str:
    lines = "\n".join(f"- {_text(note)}" for note in notes)
    return f"## What the server noted\n\nOn the uploads behind this model:\n\n{lines}\n\n" if notes else ""


def _private(found: Mapping[str, str | None] | None) -> str:
    if found is None:
        return ""
    upload = found["upload"]
    sent = "no differential privacy: nothing bounds what it gives away" if upload is None else _text(upload)
    return f"- The upload: {sent}.\n- Everything that the site ever sent: {_text(found['total'])}.\n"


def metric_rows(*tests: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The metrics of ``compare.score`` in words, a column for each set of predictions."""

    def accuracy(test: Mapping[str, Any]) -> str:
        low, high = test["accuracy_interval"] or (None, None)
        return f"{_share(test['accuracy'])} (95 % interval {_share(low)} to {_share(high)})"

    rows = [
        ("accuracy", accuracy),
        ("balanced accuracy", lambda test: _share(test["balanced_accuracy"])),
        ("macro AUC", lambda test: _plain(test["macro_auc"])),
        ("macro F1", lambda test: _plain(test["macro_f1"])),
        ("expected calibration error", lambda test: _plain(test["ece"])),
    ]
    return [(name, *map(word, tests)) for name, word in rows]


def _where(origin: Mapping[str, Any]) -> str:
    kind = "a simulation, the run" if origin["kind"] == "run" else "the federation"
    return f"{kind} {_text(origin['run'])}"


def _calibration(settings: Mapping[str, Any]) -> str:
    count = settings["calibration_images"]
    if not count:
        return "not calibrated; read them as scores, not as chances"
    return f"calibrated on {count:,} validation images of the site (temperature {settings['temperature']:g})"


def _metrics(settings: Mapping[str, Any]) -> str:
    test, alone = settings["test"], settings["alone"]
    if not test:
        return "Not measured: no images were held out. `fedbicross client evaluate` measures it."
    tests = [test] if not alone else [test, alone]
    titles = ["this model", "trained alone"][: len(tests)]
    head = f"| metric | {' | '.join(titles)} |\n|---|{'---|' * len(tests)}"
    lines = "\n".join(f"| {' | '.join(row)} |" for row in metric_rows(*tests))
    return f"On {test['images']:,} images of this site that were not trained on:\n\n{head}\n{lines}"


def _comparison(settings: Mapping[str, Any]) -> str:
    if settings["test"] and settings["comparison"] is None:
        return "Not measured: there is no model here that the site trained alone."
    return "\n\n".join(compare.advice(settings["comparison"]))


def _sent(size: int | None) -> str:
    return "" if size is None else f"One file of {size:,} bytes was made to be sent."


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
