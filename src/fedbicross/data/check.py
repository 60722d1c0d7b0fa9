"""Checks of a data set before training: what would make a result meaningless is refused, what may mislead is said.

``judge`` looks at facts only (labels, sets, pixels as digests, patients), so that `fedbicross check`, `fedbicross run`
and a site apply the same rules, whatever the images lay in. Thresholds stand here, with their reasons in docs/data.md.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedbicross.context import Progress, Silent
from fedbicross.data.catalogue import DATASETS
from fedbicross.data.dataset import Images, Split
from fedbicross.data.folder import PATIENTS, choose_test, columns, look_at, scan
from fedbicross.data.layout import Entry, Found, Problem, folders_in_every_class
from fedbicross.data.load import load_dataset
from fedbicross.data.medmnist import load_npz
from fedbicross.data.pictures import Header, Reader, convert, eight_bit, has_colour
from fedbicross.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from PIL.Image import Image

SCHEMA = 1
MAX_SHARED = 0.01  # of the test images may lie in the training set too: the most that accuracy can gain by it
MAX_UNTRAINED = 0.10  # of the test images may be of classes that nobody trains on
FEW = 10  # test images of a class: each is worth 10 points of its sensitivity
IMBALANCE = 20  # times as many images in the largest class as in the smallest
LONG = 1.5  # longer side over shorter: the centre square then drops a third of the image
EXAMPLES = 8  # images of a class in the picture
THUMBNAIL = 96  # pixels per side

LEAK, ONE_CLASS, ONE_TESTED, UNTRAINED = "same_image_in_both", "one_class", "one_class_tested", "untrained_class"
ACCEPTABLE = {
    LEAK: "the same image in train and test",
    ONE_TESTED: "test images of a single class",
    UNTRAINED: "test images of classes without training images",
    PATIENTS: "a patient in train and test; patients are then ignored",
}


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know; ``code`` is stable, ``hint`` says how to go on."""

    code: str
    level: Literal["refused", "warning"]
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


@dataclass(frozen=True, eq=False)
class Facts:
    """What is judged: one entry an image. A digest of None is a blank image, which is like every other blank one."""

    classes: tuple[str, ...]
    labels: Sequence[int]
    is_test: Sequence[bool]
    digests: Sequence[bytes | None]
    patients: Sequence[str] | None = None

    @classmethod
    def of(cls, classes: Sequence[str], train: Split, test: Split) -> Facts:
        """The facts of images in memory."""
        known = train.patients is not None and test.patients is not None
        return cls(
            tuple(classes),
            [*train.labels.tolist(), *test.labels.tolist()],
            [False] * len(train) + [True] * len(test),
            [digest(image) for part in (train, test) for image in part.images],
            [*map(str, train.patients), *map(str, test.patients)] if known else None,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Copies:
    """Images with the same pixels, by their places."""

    places: tuple[int, ...]
    where: Literal["train", "test", "both"]
    same_label: bool


def digest(pixels: np.ndarray[Any, Any]) -> bytes | None:
    """Equal for equal pixels; none for an image of one colour."""
    flat = pixels.reshape(-1, pixels.shape[-1]) if pixels.ndim == 3 else pixels.reshape(-1, 1)
    if (flat == flat[0]).all():
        return None
    return hashlib.sha256(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).digest()


def find_copies(facts: Facts) -> list[Copies]:
    """Groups of images with equal pixels, in the order of their first."""
    groups: dict[bytes, list[int]] = {}
    for place, key in enumerate(facts.digests):
        if key is not None:
            groups.setdefault(key, []).append(place)
    out = []
    for places in groups.values():
        if len(places) > 1:
            sets = {facts.is_test[place] for place in places}
            where: Literal["train", "test", "both"] = "both" if len(sets) == 2 else "test" if True in sets else "train"
            out.append(Copies(tuple(places), where, len({facts.labels[place] for place in places}) == 1))
    return out


def judge(facts: Facts, *, site: bool = False, published: bool = False) -> list[Finding]:
    """Every finding about these images.

    A ``site`` may have one class or lack some: others have them. A ``published`` set is used as its authors divided
    it, so its faults are said and not refused.
    """
    found = [*_copies(facts, published), *_patients(facts)]
    return found if published else [*found, *_classes(facts, site)]


def _copies(facts: Facts, published: bool) -> list[Finding]:
    copies = find_copies(facts)
    tested = sum(facts.is_test)
    shared = sum(facts.is_test[place] for group in copies if group.where == "both" for place in group.places)
    out = []
    if shared:
        share = shared / tested
        refused = share > MAX_SHARED and not published
        out.append(
            Finding(
                LEAK,
                "refused" if refused else "warning",
                f"{_count(shared, 'test image')} ({share:.1%}) also in the training set, pixel for pixel: the model "
                "has seen the answer",
                f"remove the copies (`fedbicross check` lists them){_accept(LEAK, refused)}",
            )
        )
    for name, here in (("train", False), ("test", True)):
        inside = (sum(facts.is_test[place] == here for place in group.places) for group in copies)
        if extra := sum(max(count - 1, 0) for count in inside):
            what = "training image" if name == "train" else "test image"
            message = f"{_count(extra, what)} with the pixels of another one of that set"
            out.append(Finding(f"copies_in_{name}", "warning", message))
    if wrong := [group for group in copies if not group.same_label]:
        names = ", ".join(facts.classes[label] for label in sorted({facts.labels[p] for p in wrong[0].places}))
        out.append(
            Finding(
                "contradiction",
                "warning",
                f"{_count(len(wrong), 'image')} under several classes, e.g. under {names}",
                "at most one of them is right",
            )
        )
    if blank := sum(key is None for key in facts.digests):
        out.append(Finding("blank", "warning", f"{_count(blank, 'image')} of one colour, showing nothing"))
    return out


def _patients(facts: Facts) -> list[Finding]:
    if facts.patients is None:
        return []
    sets: tuple[set[str], set[str]] = (set(), set())
    for patient, test in zip(facts.patients, facts.is_test, strict=True):
        sets[test].add(patient)
    both = len(sets[0] & sets[1])
    if not both:
        return []
    message = f"{_count(both, 'patient')} of {len(sets[0] | sets[1])} in both train and test"
    return [Finding(PATIENTS, "refused", message, f"keep each on one side{_accept(PATIENTS, True)}")]


def _classes(facts: Facts, site: bool) -> list[Finding]:
    out: list[Finding] = []
    train, test = count_classes(facts)
    everywhere = {name: train[name] + test[name] for name in facts.classes}
    present = [name for name, count in everywhere.items() if count]
    if len(present) < 2:
        if not site:
            hint = "put each class into a folder of its own (a site of a federation may have one class)"
            out.append(Finding(ONE_CLASS, "refused", f"all images are of one class, {present[0]!r}", hint))
        return out
    tested = [name for name in present if test[name]]
    if len(tested) == 1 and not site:
        message = f"all test images are of one class, {tested[0]!r}, so that a constant answer is right"
        out.append(Finding(ONE_TESTED, "refused", message, f"test every class{_accept(ONE_TESTED, True)}"))
    if missing := [name for name in tested if not train[name]]:
        share = sum(test[name] for name in missing) / sum(test.values())
        refused = share > MAX_UNTRAINED and not site
        out.append(
            Finding(
                UNTRAINED,
                "refused" if refused else "warning",
                f"{share:.1%} of the test images are of classes without training images: {_some(missing)}",
                f"spell every class alike in train and test{_accept(UNTRAINED, refused)}",
            )
        )
    if few := [f"{name} ({test[name]})" for name in present if train[name] and test[name] < FEW]:
        out.append(
            Finding("few_test_images", "warning", f"fewer than {FEW} test images of {_some(few)}", "read with care")
        )
    high, low = max(train.values()), min(count for count in train.values() if count) if any(train.values()) else 0
    if low and high > IMBALANCE * low:
        message = f"the largest class has {high / low:.0f} times as many training images as the smallest"
        out.append(Finding("imbalance", "warning", message, "look at balanced accuracy, not at accuracy"))
    return out


def count_classes(facts: Facts) -> tuple[dict[str, int], dict[str, int]]:
    """Images per class in train and in test."""
    counts = Counter(zip(map(bool, facts.is_test), facts.labels, strict=True))
    train, test = ({name: counts[which, label] for label, name in enumerate(facts.classes)} for which in (False, True))
    return train, test


def settle(findings: Iterable[Finding], accept: Sequence[str] = ()) -> list[str]:
    """Raise for the first finding that is refused and not accepted; the rest become warnings."""
    check_accept(accept)
    warnings = []
    for finding in findings:
        if finding.level == "refused" and finding.code not in accept:
            raise DataError(finding.code, str(finding))
        warnings.append(f"{finding.message} (accepted)" if finding.level == "refused" else str(finding))
    return warnings


def check_accept(accept: Sequence[str]) -> None:
    """Refuse a code that cannot be accepted."""
    for code in accept:
        if code not in ACCEPTABLE:
            raise ConfigError("unknown_accept", f"{code!r} cannot be accepted{nearest(code, ACCEPTABLE)}")


def _accept(code: str, refused: bool) -> str:
    return f", or accept it with --accept {code}" if refused else ""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- a folder, a manifest or an array file, looked at from end to end ------------------------------------


@dataclass
class Checked:
    """All that was seen, ready for a person or, by ``as_json``, for a program."""

    path: str
    layout: str
    findings: list[Finding] = field(default_factory=list)
    skipped: list[Problem] = field(default_factory=list)
    unreadable: list[Problem] = field(default_factory=list)
    classes: tuple[str, ...] = ()
    train: dict[str, int] = field(default_factory=dict)
    test: dict[str, int] = field(default_factory=dict)
    test_set: str = "given"  # or "held out": by the rule that `run` applies, seed 0
    kinds: dict[str, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # "width x height" → images, most frequent first
    patients: dict[str, int] | None = None
    copies: list[dict[str, Any]] = field(default_factory=list)
    examples: dict[str, list[Images]] = field(default_factory=dict, repr=False)

    def refused(self, accept: Sequence[str] = ()) -> bool:
        """Whether `run` would refuse these data."""
        return any(finding.level == "refused" and finding.code not in accept for finding in self.findings)

    def as_json(self, accept: Sequence[str] = ()) -> dict[str, Any]:
        """A stable description: names are only added while the schema keeps its number."""
        shown = {key: value for key, value in vars(self).items() if key not in ("examples", "train", "test")}
        shown |= {key: [asdict(item) for item in shown[key]] for key in ("findings", "skipped", "unreadable")}
        images = {"train": self.train, "test": self.test}
        searched = {"near_copies": "not searched"}
        return {"schema": SCHEMA, "refused": self.refused(accept), **shown, **searched, "images": images}


def check(source: str | Path, progress: Progress | None = None) -> Checked:
    """Look at every image of a folder, a CSV manifest, an ``.npz`` file or a known data set."""
    path = Path(source)
    shown = progress or Silent()
    if not (path.is_dir() or path.suffix.lower() == ".csv"):
        return _check_arrays(str(source))
    if not path.exists():
        raise DataError("missing_file", f"{path} does not exist")
    out = Checked(str(path), "unknown")
    try:
        found = scan(path)
    except DataError as error:  # no layout, nothing to look at
        out.findings.append(Finding(error.code, "refused", str(error.args[0])))
        return out
    out.layout, out.skipped = found.layout, found.skipped
    update = shown.start("reading headers", len(found.entries))
    headers = look_at(found, lambda done: update(done, ""))
    seen = _decode_all(found, headers, out, shown)
    out.unreadable = found.problems
    if found.problems:
        message = f"{len(found.problems)} files or lines cannot be read, e.g. {found.problems[0].reason}"
        out.findings.append(Finding("unreadable", "refused", message, "mend, remove or unlist them; all are listed"))
    if not seen:
        out.findings.append(Finding("empty", "refused", f"{path} holds no image that can be read"))
        return out
    _describe(path, seen, out)
    return out


def _decode_all(
    found: Found, headers: Sequence[Header], out: Checked, progress: Progress
) -> list[tuple[Entry, Header, bytes | None]]:
    reader, grey = Reader(), all(header.grey for header in headers)
    update = progress.start("looking at images", len(headers))
    seen, colour = [], False
    for done, (entry, header) in enumerate(zip(found.entries, headers, strict=True), start=1):
        try:
            with reader.decoded(entry.path, entry.slice) as image:
                pixels = _pixels(image, entry.path)
                key, colour = digest(pixels), colour or has_colour(pixels)
                examples = out.examples.setdefault(entry.label, [])
                if len(examples) < EXAMPLES:
                    examples.append(convert(image, THUMBNAIL, grey, entry.path))
            seen.append((entry, header, key))
        except DataError as error:
            found.problems.append(Problem(str(entry), error.code, str(error.args[0])))
        update(done, "")
    if seen and not colour and not grey:
        message = "files are saved in colour, but show greys only: they are read as grey"
        out.findings.append(Finding("grey_as_colour", "warning", message, "sites should agree on `--channels 1`"))
    return seen


def _pixels(image: Image, path: Path) -> np.ndarray[Any, Any]:
    """What is compared: grey and colour files of the same picture are the same picture."""
    return np.asarray(eight_bit(image, path).convert("RGB"))


def _describe(path: Path, seen: Sequence[tuple[Entry, Header, bytes | None]], out: Checked) -> None:
    entries = [entry for entry, _, _ in seen]
    classes = tuple(sorted({entry.label for entry in entries}))
    labels = np.array([classes.index(entry.label) for entry in entries], np.int64)
    if entries[0].split is None:
        out.test_set = "held out"
    try:
        # The rule of `run` with its default settings, so that both see the same test set.
        is_test = choose_test(path.name, entries, labels, 0.2, np.random.default_rng((0, 0)))
    except DataError as error:
        out.findings.append(Finding(error.code, "refused", str(error.args[0])))
        is_test = np.zeros(len(entries), bool)
    patients, _ = columns(entries)
    names = None if patients is None else [str(name) for name in patients]
    facts = Facts(classes, labels.tolist(), is_test.tolist(), [key for _, _, key in seen], names)
    _fill(out, facts, [str(entry) for entry in entries])
    for which, part in (("training", ~is_test), ("test", is_test)):
        if out.test_set == "given" and not part.any():
            out.findings.append(Finding("empty", "refused", f"the {which} set holds no image that can be read"))
    if path.is_dir() and (inner := folders_in_every_class(path, entries)):
        message = f"every class holds folders of the same names: {_some(inner)}"
        hint = f"if those are the classes, and {_some(classes)} sites or sets, say so in a CSV manifest"
        out.findings.append(Finding("folders_in_every_class", "warning", message, hint))
    headers = [header for _, header, _ in seen]
    out.kinds = _tally(header.kind for header in headers)
    out.modes = _tally(header.mode for header in headers)
    out.sizes = _tally(f"{header.width} x {header.height}" for header in headers)
    if long := sum(max(h.width, h.height) > LONG * min(h.width, h.height) for h in headers):
        message = f"{_count(long, 'image')} with one side more than {LONG} times the other"
        out.findings.append(
            Finding("long_images", "warning", message, "only the centre square is used: crop them first")
        )
    if len({header.grey for header in headers}) == 2:
        message = "some files are grey and some in colour"
        out.findings.append(Finding("mixed_colour", "warning", message, "does colour give the class away?"))
    tagged = sum(header.kind == "dicom" for header in headers)
    nameless = sum(header.kind == "dicom" and header.patient is None for header in headers)
    if tagged and patients is None:
        message = "the DICOM files do not tell patients apart (no PatientID, or one for all)"
        out.findings.append(Finding("no_patients", "warning", message, "name them in a CSV manifest (patient_id)"))
    elif nameless and out.layout != "manifest":
        message = f"{_count(nameless, 'DICOM file')} without PatientID, counted as a patient each"
        out.findings.append(Finding("no_patients", "warning", message, "name them in a CSV manifest (patient_id)"))


def _check_arrays(source: str) -> Checked:
    # An array file says itself how large its images are.
    dataset = load_npz(Path(source)) if source.lower().endswith(".npz") else load_dataset(source)
    out = Checked(source, "arrays")
    facts = Facts.of(dataset.classes, dataset.train, dataset.test)
    place = [*(f"train {i}" for i in range(len(dataset.train))), *(f"test {i}" for i in range(len(dataset.test)))]
    _fill(out, facts, place, published=source in DATASETS)
    size = f"{dataset.image_size} x {dataset.image_size}"
    count = len(facts.labels)
    out.kinds, out.modes, out.sizes = {"array": count}, {"L" if dataset.channels == 1 else "RGB": count}, {size: count}
    for label, name in enumerate(dataset.classes):
        out.examples[name] = list(dataset.train.images[dataset.train.labels == label][:EXAMPLES])
    return out


def _fill(out: Checked, facts: Facts, names: Sequence[str], published: bool = False) -> None:
    out.classes = facts.classes
    out.train, out.test = count_classes(facts)
    out.findings += judge(facts, published=published)
    out.copies = [
        {
            "images": [names[place] for place in group.places],
            "classes": [facts.classes[facts.labels[place]] for place in group.places],
            "where": group.where,
        }
        for group in find_copies(facts)
    ]
    if facts.patients is not None:
        sides = [{p for p, test in zip(facts.patients, facts.is_test, strict=True) if test is w} for w in (False, True)]
        out.patients = {"train": len(sides[0]), "test": len(sides[1]), "both": len(sides[0] & sides[1])}


def _tally(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())
