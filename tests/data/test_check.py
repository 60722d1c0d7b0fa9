from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from fedbicross.data import check as doctor
from fedbicross.data.folder import load_folder
from fedbicross.data.grid import CELL, GAP, example_grid

from .helpers import raises, toy
from .scans import dicom
from .test_folder import class_folders, manifest


def facts(train, test, digests=None, patients=None, classes=("a", "b", "c")):
    """Labels of both sets; unless given, every image differs."""
    count = len(train) + len(test)
    keys = digests or [str(i).encode() for i in range(count)]
    return doctor.Facts(classes, [*train, *test], [False] * len(train) + [True] * len(test), keys, patients)


def codes(*args, **options):
    return {finding.code: finding.level for finding in doctor.judge(*args, **options)}


MANY = [0, 1, 2] * 10


def test_nothing_to_say():
    assert codes(facts(MANY, MANY)) == {}


@pytest.mark.parametrize(("shared", "level"), [(0, None), (10, "warning"), (11, "refused")])
def test_copies_between_sets(shared, level):
    train, test = [0, 1] * 500, [0, 1] * 500
    keys = [str(i).encode() for i in range(1000)] + [str(i if i < shared else i + 5000).encode() for i in range(1000)]
    found = facts(train, test, keys, classes=("a", "b"))
    assert codes(found).get("same_image_in_both") == level
    assert codes(found, published=True).get("same_image_in_both") == (level and "warning")


def test_copies_within_sets_and_contradictions():
    keys = [str(i).encode() for i in range(60)]
    keys[3], keys[30 + 6] = keys[0], keys[30 + 3]  # the same class within train, and within test
    assert codes(facts(MANY, MANY, keys)) == {"copies_in_train": "warning", "copies_in_test": "warning"}
    keys[4] = keys[5]
    assert codes(facts(MANY, MANY, keys))["contradiction"] == "warning"


def test_a_copy_in_the_other_set_does_not_hide_one_in_its_own():
    keys = [str(i).encode() for i in range(60)]
    keys[3] = keys[6] = keys[30] = keys[0]
    found = {finding.code: finding.message for finding in doctor.judge(facts(MANY, MANY, keys))}
    assert found["same_image_in_both"].startswith("1 test image ")
    assert found["copies_in_train"].startswith("2 training images ") and "copies_in_test" not in found


def test_blank_images_are_no_copies():
    assert codes(facts(MANY, MANY, [None] * 60)) == {"blank": "warning"}
    assert doctor.digest(np.full((4, 4, 3), 7, np.uint8)) is None
    assert doctor.digest(np.eye(4, dtype=np.uint8)) == doctor.digest(np.eye(4, dtype=np.uint8)) is not None


def test_patients_in_both_sets():
    patients = [f"p{i}" for i in range(60)]
    assert codes(facts(MANY, MANY, patients=patients)) == {}
    assert codes(facts(MANY, MANY, patients=[*patients[:59], "p0"])) == {"patient_in_both_splits": "refused"}


def test_classes():
    assert codes(facts([0] * 30, [0] * 30)) == {"one_class": "refused"}
    assert codes(facts([0] * 30, [0] * 30), site=True) == {}
    assert codes(facts(MANY, [1] * 30))["one_class_tested"] == "refused"
    assert codes(facts([0, 1] * 100, [0, 1] * 46 + [2] * 10))["untrained_class"] == "warning"
    assert codes(facts([0, 1] * 100, [0, 1] * 40 + [2] * 10))["untrained_class"] == "refused"
    assert codes(facts([0, 1] * 100, [0, 1] * 40 + [2] * 10), site=True)["untrained_class"] == "warning"
    assert codes(facts(MANY, MANY[:-1])) == {"few_test_images": "warning"}
    assert codes(facts([0] * 200 + [1] * 10, [0, 1] * 10)) == {}
    assert codes(facts([0] * 201 + [1] * 10, [0, 1] * 10)) == {"imbalance": "warning"}


def test_settling():
    found = doctor.judge(facts(MANY, [1] * 30))
    with raises("one_class_tested", "--accept one_class_tested"):
        doctor.settle(found)
    assert any("(accepted)" in text for text in doctor.settle(found, ["one_class_tested"]))
    with raises("unknown_accept", "did you mean 'one_class_tested'"):
        doctor.settle(found, ["one_class_test"])
    with raises("unknown_accept"):
        doctor.settle(found, ["one_class"])  # nothing could be learned


def test_facts_of_images_in_memory():
    data = toy()
    found = doctor.Facts.of(data.classes, data.train, data.test)
    assert len(set(found.digests)) == 260 and sum(found.is_test) == 60
    again = doctor.Facts.of(data.classes, data.train, data.train)
    assert codes(again)["same_image_in_both"] == "refused"


# --- whole folders -------------------------------------------------------------------------------------------------


def noise(path, seed, size=(20, 20), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (*size[::-1], 3) if mode == "RGB" else size[::-1]
    Image.fromarray(np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)).save(path)
    return path


def brain(root, copies=6):
    """Like the brain MRIs that everybody downloads: `Training`, `Testing`, and the same pictures in both."""
    seed = 0
    for part, count in (("Training", 30), ("Testing", 12)):
        for label in ("glioma_tumor", "no_tumor"):
            for number in range(count):
                noise(root / part / label / f"image({number}).png", seed := seed + 1)
    for number in range(copies):
        source = root / "Training" / "glioma_tumor" / f"image({number}).png"
        with Image.open(source) as image:
            image.save(root / "Testing" / "glioma_tumor" / f"copy {number}.bmp")
    return root


def test_the_brain_case_is_not_misread_and_refused(tmp_path):
    found = doctor.check(brain(tmp_path))
    assert (found.layout, found.classes, found.test_set) == ("split_folders", ("glioma_tumor", "no_tumor"), "given")
    assert found.train == {"glioma_tumor": 30, "no_tumor": 30} and found.test == {"glioma_tumor": 18, "no_tumor": 12}
    assert [f.code for f in found.findings if f.level == "refused"] == ["same_image_in_both"]
    assert found.refused() and not found.refused(["same_image_in_both"])
    assert len(found.copies) == 6 and found.copies[0]["where"] == "both"
    assert found.copies[0]["images"] == [
        str(tmp_path / "Training" / "glioma_tumor" / "image(0).png"),
        str(tmp_path / "Testing" / "glioma_tumor" / "copy 0.bmp"),
    ]


@pytest.mark.parametrize("outer", [("north", "south"), ("one/Training", "two/Training", "one/Testing", "two/Testing")])
def test_classes_that_lie_inside_of_sites_or_sets_are_pointed_out(tmp_path, outer):
    for number, folder in enumerate(outer):
        for label in ("glioma", "none"):
            for image in range(50):
                noise(tmp_path / folder / label / f"{image}.png", hash((number, label == "none", image)) % 2**32)
    (finding,) = doctor.check(tmp_path).findings
    assert (finding.code, finding.level) == ("folders_in_every_class", "warning")
    assert finding.message.endswith("glioma, none") and outer[0].partition("/")[0] in finding.hint
    assert "glioma: are those the classes?" in load_folder(tmp_path).note


def test_folders_of_patients_are_none_of_that(tmp_path):
    for label in ("benign", "malignant"):
        for image in range(50):
            noise(tmp_path / label / f"{label} {image % 9}" / f"{image}.png", image + 100 * len(label))
            noise(tmp_path / label / "film" / f"{image}.png", image + 200 * len(label))
    assert doctor.check(tmp_path).findings == []
    assert load_folder(tmp_path).note == "own images"


def test_everything_that_cannot_be_read_is_listed(tmp_path):
    brain(tmp_path, copies=0)
    for number in range(7):
        (tmp_path / "Training" / "no_tumor" / f"bad{number}.png").write_bytes(b"no image")
    whole = noise(tmp_path / "Testing" / "no_tumor" / "half.png", 999, (64, 64)).read_bytes()
    (tmp_path / "Testing" / "no_tumor" / "half.png").write_bytes(whole[:2000])  # found only when it is decoded
    found = doctor.check(tmp_path)
    assert len(found.unreadable) == 8 and "half.png" in found.unreadable[-1].where
    assert [f.code for f in found.findings] == ["unreadable"] and found.refused()


def test_sizes_modes_kinds_and_shapes(tmp_path):
    brain(tmp_path, copies=0)
    noise(tmp_path / "Training" / "no_tumor" / "long.png", 1001, (40, 20))
    noise(tmp_path / "Training" / "no_tumor" / "red.png", 1002, mode="RGB")
    rng = np.random.default_rng(5)
    for number in range(2):
        dicom(tmp_path / "Training" / "no_tumor" / f"{number}", rng.integers(99, size=(20, 20), dtype=np.uint16), "p")
    found = doctor.check(tmp_path)
    assert found.kinds == {"image": 86, "dicom": 2}
    assert found.modes == {"L": 87, "RGB": 1} and found.sizes == {"20 x 20": 87, "40 x 20": 1}
    assert {f.code for f in found.findings} == {"long_images", "mixed_colour"}
    assert found.patients == {"train": 63, "test": 24, "both": 0}, "an image without a patient is one of its own"


def test_greys_saved_in_colour_are_told(tmp_path):
    for number in range(80):
        name = tmp_path / ("train" if number < 40 else "test") / f"class-{number % 2}" / f"{number}.png"
        name.parent.mkdir(parents=True, exist_ok=True)
        Image.open(noise(name, number)).convert("L").convert("RGB").save(name)
    assert [f.code for f in doctor.check(tmp_path).findings] == ["grey_as_colour"]
    noise(name, 1000, mode="RGB")
    assert doctor.check(tmp_path).findings == []


def test_dicom_without_patients(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(100):
        values = rng.integers(99, size=(9, 9), dtype=np.uint16)
        dicom(tmp_path / "ab"[number % 2] / f"{number}.dcm", values, None if number else "P1")
    assert [f.code for f in doctor.check(tmp_path).findings] == ["no_patients"]
    (tmp_path / "a" / "0.dcm").unlink()
    found = doctor.check(tmp_path)
    assert [f.code for f in found.findings] == ["few_test_images", "no_patients"] and found.patients is None


def test_a_layout_that_is_not_recognised(tmp_path):
    class_folders(tmp_path / "test", 2)
    found = doctor.check(tmp_path)
    assert found.layout == "unknown" and [f.code for f in found.findings] == ["no_train"] and found.refused()


def test_one_class_and_too_few(tmp_path):
    class_folders(tmp_path / "one", 20, ("cat",))
    assert "one_class" in {f.code for f in doctor.check(tmp_path / "one").findings}
    class_folders(tmp_path / "few", 1)
    assert "empty" in {f.code for f in doctor.check(tmp_path / "few").findings}


def test_manifest_with_patients_in_both(tmp_path):
    rows = []
    for i in range(80):
        noise(tmp_path / f"{i}.png", i)
        rows.append((f"{i}.png", "ab"[i % 2], f"p{i % 60}", "train" if i < 40 else "test"))
    found = doctor.check(manifest(tmp_path, rows, ("path", "label", "patient_id", "split")))
    assert found.patients == {"train": 40, "test": 40, "both": 20}
    assert [f.code for f in found.findings] == ["patient_in_both_splits"]


def test_missing(tmp_path):
    with raises("missing_file"):
        doctor.check(tmp_path / "no.csv")
    with raises("missing_file"):
        doctor.check(tmp_path / "no" / "folder")


@pytest.mark.slow
def test_known_sets_and_json():
    found = doctor.check("cells")
    assert found.layout == "arrays" and not found.refused()
    shown = json.loads(json.dumps(found.as_json()))
    assert set(shown) == {
        *("schema", "refused", "path", "layout", "findings", "skipped", "unreadable", "classes", "test_set", "kinds"),
        *("modes", "sizes", "patients", "copies", "near_copies", "images"),
    }
    assert shown["schema"] == 1 and set(shown["images"]) == {"train", "test"}


def test_grid_has_a_row_and_a_name_for_each_class():
    red, grey = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 1), 77, np.uint8)
    red[..., 0] = 200
    picture = Image.open(io.BytesIO(example_grid({"red": [red, red], "grey\x1b[2J" * 20: [grey]})))
    assert picture.height == 2 * (CELL + GAP) + GAP
    pixels = np.asarray(picture)
    assert pixels[GAP + 10, 210].tolist() == [200, 0, 0] and pixels[CELL + 2 * GAP + 10, 210].tolist() == [77] * 3
    for row in range(2):
        name = pixels[row * (CELL + GAP) + GAP : (row + 1) * (CELL + GAP), :190]
        assert name.min() < 100, "a name is written"
