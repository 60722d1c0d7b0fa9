"""What a synthesis did, in numbers, pictures and words: these methods fail silently otherwise.

Everything here looks at uploads and synthetic images only. Thresholds are stated with each warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbicross.steps.clustering.agreement import soft_label_entropy
from fedbicross.steps.inversion import structure

if TYPE_CHECKING:
    from fedbicross.context import Record
    from fedbicross.steps.trajectory import Sample, Teacher

UNIFORM = 0.95  # normalised entropy of soft labels (at temperature 1) above which they hardly teach
NO_STRUCTURE = 0.15  # lag-1 autocorrelation below which a batch is still noise
COLLAPSED = 0.99  # one cluster's share of all cross-cluster weight
GOOD_AGREEMENT = 0.9  # share of synthetic images of which student and teacher say the same
MOST_REPEATS = 100  # FedISCA's number of trajectories
SAME_IMAGE = 0.02  # standard deviation of a pixel over a class's images, of a range of 2, below which they are one
STRIP_COLUMNS = 8
MOST_POINTS = 200  # of a curve

INVERSION_HINTS = {
    "uniform": "use more clusters, or teacher=class_weighted",
    "structure": "raise alpha_bn, alpha_tv or steps",
    "unreached": "perhaps no client of it has that class, or alpha_bn outweighs the cross-entropy: lower it",
}


class Curves:
    """Losses over the steps, thinned to what a plot can show; values stay on the device until the end."""

    def __init__(self, total: int) -> None:
        self.every = max(1, total // MOST_POINTS)
        self.x: list[int] = []
        self.values: dict[str, list[Tensor]] = {}

    def add(self, step: int, **values: Tensor) -> None:
        """Keep this step's values if it is one to be shown."""
        if step % self.every == 0:
            self.x.append(step)
            for name, value in values.items():
                self.values.setdefault(name, []).append(value.detach())

    def plot(self, names: Sequence[str], ylabel: str) -> dict[str, Any]:
        """As the report draws it."""
        series = {name: [_number(v) for v in self.values.get(name, [])] for name in names}
        return {"x": self.x, "series": series, "xlabel": "step", "ylabel": ylabel}

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        out = {
            f"curve/{name}": torch.stack([value.float().cpu() for value in values])
            for name, values in self.values.items()
        }
        return {**out, "curve_x": torch.tensor(self.x, dtype=torch.int64)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.x = [int(x) for x in tensors["curve_x"]]
        self.values = {
            key.removeprefix("curve/"): list(value) for key, value in tensors.items() if key.startswith("curve/")
        }


def _number(value: Tensor) -> float | None:
    number = float(value)
    return round(number, 6) if math.isfinite(number) else None  # JSON has no infinity; the plot leaves a gap


class Strip:
    """One image per class at a few moments from noise to the end, as uint8."""

    def __init__(self, steps: int, classes: int) -> None:
        last = max(steps, 1)
        self.moments = sorted({max(1, round(last * i / (STRIP_COLUMNS - 1))) for i in range(STRIP_COLUMNS)})
        self.classes = classes
        self.frames: list[Tensor] = []
        self.taken: list[int] = []

    def add(self, sample: Sample) -> None:
        """Keep the first image of each class if this is one of the moments."""
        if sample.t in self.moments and sample.t not in self.taken:
            images = sample.images[: self.classes]
            self.taken.append(sample.t)
            self.frames.append(((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu())

    def grid(self) -> Any:
        """[classes, moments, H, W, C] as a NumPy array for a PNG."""
        return torch.stack(self.frames, 1).permute(0, 1, 3, 4, 2).numpy()

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        frames = {f"strip/{t}": frame for t, frame in zip(self.taken, self.frames, strict=True)}
        return {**frames, "strip_t": torch.tensor(self.taken, dtype=torch.int64)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.taken = [int(t) for t in tensors["strip_t"]]
        self.frames = [tensors[f"strip/{t}"].cpu() for t in self.taken]


@torch.no_grad()
def describe_synthesis(
    record: Record, title: str, teacher: Teacher, images: Tensor, labels: Tensor, classes: Sequence[str]
) -> None:
    """Diagnosis of images inverted from ``teacher``."""
    logits = teacher.ensemble.logits(images).mean(0)
    soft = replace(teacher, temperature=1.0).original(images)
    describe_images(record, title, logits, soft, images, labels, classes, INVERSION_HINTS)


@torch.no_grad()
def describe_images(
    record: Record,
    title: str,
    logits: Tensor,
    soft: Tensor,
    images: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    hints: Mapping[str, str],
) -> None:
    """Entropy of the teacher's soft labels, its cross-entropy per class, and whether the images have structure.

    ``soft`` are the soft labels at temperature 1; ``hints`` say which settings of the method to change.
    """
    log_probabilities = logits.log_softmax(-1)
    entropy = float(soft_label_entropy(soft))
    smooth = float(structure(images.float()))
    per_class: list[tuple[str, float, float]] = []
    for index, name in enumerate(classes):
        rows = labels == index
        if bool(rows.any()):
            loss = -log_probabilities[rows, index].mean()
            hit = (logits[rows].argmax(1) == index).float().mean()
            per_class.append((name, round(float(loss), 4), round(float(hit), 4)))
    record.add("scalars", f"{title}: soft-label entropy (0 sure, 1 uniform)", round(entropy, 4))
    record.add("scalars", f"{title}: spatial structure of the images (0 is noise)", round(smooth, 4))
    columns = ["class", "teacher's cross-entropy", "share that the teacher calls so"]
    record.add(
        "tables",
        f"{title}: how well the images fit their class",
        {"columns": columns, "rows": [list(row) for row in per_class]},
    )
    if entropy > UNIFORM:
        record.warn(
            f"{title}: the teacher's soft labels are nearly uniform (entropy {entropy:.2f} of 1): "
            f"there is little to learn; {hints['uniform']}"
        )
    if smooth < NO_STRUCTURE:
        record.warn(f"{title}: the images have no structure (autocorrelation {smooth:.2f}); {hints['structure']}")
    unreached = [name for name, _, hit in per_class if hit < 0.5]
    if unreached:
        record.warn(
            f"{title}: the teacher does not recognise its own images of {', '.join(map(str, unreached[:8]))}; "
            f"{hints['unreached']}"
        )


def describe_variety(record: Record, title: str, variety: Sequence[float], classes: Sequence[str], hint: str) -> None:
    """How much the images of each class differ (`adversarial.variety`), and which classes are one picture only."""
    found = {name: round(value, 4) for name, value in zip(classes, variety, strict=True) if not math.isnan(value)}
    rows = [[name, value] for name, value in found.items()]
    columns = ["class", "standard deviation over its images (0 is one picture; range 2)"]
    record.add("tables", f"{title}: variety of the images", {"columns": columns, "rows": rows})
    same = [str(name) for name, value in found.items() if value < SAME_IMAGE]
    if same:
        record.warn(f"{title}: the generator collapsed: nearly the same image for all of {', '.join(same[:8])}; {hint}")


def describe_student(record: Record, title: str, student_logits: Tensor, teacher_soft: Tensor) -> float:
    """Does the student say what its teacher says, on finished synthetic images? The share where it does."""
    classes = teacher_soft.shape[-1]
    agreement = float((student_logits.argmax(-1) == teacher_soft.argmax(-1)).float().mean())
    record.add("scalars", f"{title}: student agrees with its teacher on synthetic images", round(agreement, 4))
    if agreement < 1.5 / classes:
        record.warn(
            f"{title}: the student has not learned its teacher (agreement {agreement:.0%} on synthetic images); "
            "raise the student's learning rate or the number of epochs or trajectories"
        )
    return agreement


def recommend_repeats(record: Record, setting: str, repeats: int, agreement: float) -> int:
    """How many trajectories would bring the weakest student to `GOOD_AGREEMENT`, if disagreement falls as 1/√steps.

    A rule of thumb from synthetic images alone: R (1−a)² / (1−0.9)², at least what was done and at most FedISCA's 100.
    On Blood, alpha = 0.1, it held for K = 2 and asked for too little at K = 3 and 4 (docs/results.md).
    """
    wanted = math.ceil(round(repeats * ((1 - agreement) / (1 - GOOD_AGREEMENT)) ** 2, 6))
    wanted = max(repeats, min(wanted, MOST_REPEATS))
    record.add("scalars", f"recommended {setting}", wanted)
    if wanted > repeats:
        record.warn(
            f"the weakest student agrees with its teacher on {agreement:.0%} of the synthetic images; "
            f"{setting}={wanted} or more may bring it to {GOOD_AGREEMENT:.0%} (now {repeats})"
        )
    return wanted


def describe_weights(
    record: Record, history: Sequence[Sequence[Sequence[float]]], x: Sequence[int], learned: bool = True
) -> None:
    """Cross-cluster weights over time as a heat map per cluster, and a warning when learned ones collapse."""
    clusters = len(history[-1])
    for k in range(clusters):
        values = [[round(float(w[k][j]), 4) for w in history] for j in range(clusters)]
        rows = [f"from cluster {j}" + (" (own)" if j == k else "") for j in range(clusters)]
        title = f"cross-cluster weights of cluster {k}"
        record.add("heatmaps_over_time", title, {"x": list(x), "rows": rows, "values": values})
    names = [f"cluster {k}" for k in range(clusters)]
    final = [[round(float(v), 4) for v in row] for row in history[-1]]
    record.add(
        "heatmaps",
        "final cross-cluster weights (row listens to column)",
        {"values": final, "rows": names, "columns": names},
    )
    if clusters > 1 and learned:
        for k, row in enumerate(final):
            top = max(range(clusters), key=lambda j: row[j])
            if row[top] >= COLLAPSED:
                where = "itself" if top == k else f"cluster {top}"
                record.warn(
                    f"the weights of cluster {k} collapsed onto {where}; lower lr_weights, or use weight_step=mirror"
                )


def describe_personal(record: Record, client: str, scores: Mapping[str, float]) -> None:
    """On a client's own validation images: is the personal model worth having? Nothing where there are none."""
    if not scores:
        return
    title = f"{client}: accuracy on its own validation images"
    record.add("tables", title, {"columns": list(scores), "rows": [[round(v, 4) for v in scores.values()]]})
    if scores["personal"] < scores["cluster model"]:
        record.warn(f"{client}: the personal model is worse than its cluster model; raise gamma or lower lr_personal")
    if scores["personal"] < scores["own model"]:
        record.warn(
            f"{client}: the personal model is worse than training alone on its own validation images; "
            "raise delta or epochs_personal, or lower temperature_personal"
        )
