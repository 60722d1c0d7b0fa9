from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fedbicross.data.folder import find_images
from fedbicross.data.layout import scan_folder, split_of
from fedbicross.data.manifest import scan_manifest
from fedbicross.errors import DataError

from .helpers import raises
from .test_folder import class_folders, picture


def sets(root):
    """(set, class) → number of images."""
    found: dict[tuple[str | None, str], int] = {}
    for entry in scan_folder(root).entries:
        found[entry.split, entry.label] = found.get((entry.split, entry.label), 0) + 1
    return found


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("train", "Training", "TRAIN", "train_set", "Train Images", "training-data", "trainset"), "train"),
        (("val", "valid", "Validation", "validation_set"), "val"),
        (("test", "Testing", "Test_Set", "hold-out", "held_out"), "test"),
        (("tester", "training wheels", "attest", "trains", "set", "data", "validity", "benign"), None),
    ],
)
def test_names_of_sets(names, kind):
    assert {name: split_of(name) for name in names} == dict.fromkeys(names, kind)


@pytest.mark.parametrize("train", ["train", "Training", "TRAIN_SET"])
@pytest.mark.parametrize("test", ["test", "Testing"])
@pytest.mark.parametrize("around", ["", "archive"])
def test_sets_are_never_classes(tmp_path, train, test, around):
    class_folders(tmp_path / around / train, 3)
    class_folders(tmp_path / around / test, 2)
    class_folders(tmp_path / around / "Validation", 1)
    assert sets(tmp_path) == {("train", "cat"): 4, ("train", "dog"): 4, ("test", "cat"): 2, ("test", "dog"): 2}


def test_classes_then_sets_and_doubled_folders(tmp_path):
    for label in ("cat", "dog"):
        class_folders(tmp_path / "a" / label, 2, ("Train", "Test"))
    expected = {("train", "cat"): 2, ("test", "cat"): 2, ("train", "dog"): 2, ("test", "dog"): 2}
    assert sets(tmp_path / "a") == expected and scan_folder(tmp_path / "a").layout == "class_then_split"
    class_folders(tmp_path / "b" / "train" / "train", 2)
    class_folders(tmp_path / "b" / "test" / "test", 2)
    assert sets(tmp_path / "b") == expected


def test_without_a_test_set_one_is_held_out(tmp_path):
    class_folders(tmp_path / "Training", 3)
    class_folders(tmp_path / "validation", 1)
    assert sets(tmp_path) == {(None, "cat"): 4, (None, "dog"): 4}


@pytest.mark.parametrize(
    ("code", "folders"),
    [
        ("no_train", ["test/cat", "test/dog"]),
        ("no_train", ["cat/test", "dog/test"]),
        ("mixed_layout", ["cat", "dog", "test"]),
        ("mixed_layout", ["train/train", "train/test"]),
        ("mixed_layout", ["cat/train", "cat/test", "dog"]),
        ("no_class_folders", ["train", "test"]),
        ("no_class_folders", ["."]),
    ],
)
def test_what_cannot_be_told(tmp_path, code, folders):
    for folder in folders:
        picture(tmp_path / folder / "x.png")
    with raises(code):
        scan_folder(tmp_path)


def test_what_lies_beside_is_said(tmp_path):
    class_folders(tmp_path / "train", 1)
    class_folders(tmp_path / "test", 1)
    class_folders(tmp_path, 1, ("masks",))
    picture(tmp_path / "train" / "loose.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("hello")
    found = scan_folder(tmp_path)
    assert len(found.entries) == 4
    assert {(Path(s.where).name, s.code) for s in found.skipped} == {
        ("masks", "outside"),
        ("loose.png", "outside"),
        ("notes.txt", "not_an_image"),
    }


def test_pipes_and_sockets_are_never_opened(tmp_path, monkeypatch):
    class_folders(tmp_path, 2)
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    os.mkfifo(tmp_path / "cat" / "pipe")  # without an ending: would be looked into for DICOM's mark
    (tmp_path / "cat" / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "cat" / "elsewhere").symlink_to(tmp_path / "dog")
    monkeypatch.chdir(tmp_path / "dog")  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.png")
        found = scan_folder(tmp_path)
    assert len(found.entries) == 4
    assert {(Path(s.where).name, s.code) for s in found.skipped} == {
        ("pipe.png", "not_a_file"),
        ("pipe", "not_a_file"),
        ("gone.png", "not_a_file"),
        ("s.png", "not_a_file"),
        ("elsewhere", "link"),
    }
    (tmp_path / "m.csv").write_text("path,label\ncat/pipe.png,a\ndog/00.png,b\n")
    with raises("not_a_file", "pipe.png"):
        find_images(tmp_path / "m.csv")


@pytest.mark.parametrize("name", [".ipynb_checkpoints", ".thumbnails", "__MACOSX"])
def test_hidden_folders_are_passed_over(tmp_path, name):
    class_folders(tmp_path, 2)
    picture(tmp_path / "cat" / name / "00.png")
    picture(tmp_path / "cat" / "deeper" / name / "deep" / "00.png")
    picture(tmp_path / "cat" / "deeper" / "00.png")
    assert sets(tmp_path) == {(None, "cat"): 3, (None, "dog"): 2} and not scan_folder(tmp_path).skipped


@pytest.mark.parametrize(
    ("folders", "link", "images"),
    [
        (["cat", "dog"], "bird", 2),  # a class
        (["train/cat", "test/cat"], "val", 2),  # a set
        (["train/cat", "test/cat"], "train/bird", 2),
        (["train/train/cat", "test/cat"], "train/bird", 2),
        (["cat/train", "cat/test"], "cat/val", 2),
        (["cat/train", "cat/test"], "bird", 2),
        (["archive/train/cat", "archive/test/cat"], "linked", 2),
    ],
)
def test_links_to_folders_are_passed_over_and_noted(tmp_path, folders, link, images):
    for folder in folders:
        picture(tmp_path / "data" / folder / "x.png")
    picture(tmp_path / "private" / "y.png")
    picture(tmp_path / "private" / "z" / "y.png")
    (tmp_path / "data" / link).symlink_to(tmp_path / "private")
    found = scan_folder(tmp_path / "data")
    assert [entry.path.name for entry in found.entries] == ["x.png"] * images
    assert [(skipped.where, skipped.code) for skipped in found.skipped] == [(str(tmp_path / "data" / link), "link")]


def test_a_folder_of_links_only_is_refused_by_name(tmp_path):
    class_folders(tmp_path / "real", 2)
    (tmp_path / "data").mkdir()
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).symlink_to(tmp_path / "real" / label)
    with raises("no_class_folders", "links"):
        scan_folder(tmp_path / "data")
    (tmp_path / "all").symlink_to(tmp_path / "real")
    assert len(scan_folder(tmp_path / "all").entries) == 4, "the folder that the user names may be a link"


def test_every_bad_file_is_named_at_once(tmp_path):
    class_folders(tmp_path, 5)
    for number in range(2):
        (tmp_path / "cat" / f"bad{number}.png").write_bytes(b"no image")
    with raises("unreadable_image", "bad1.png"):
        find_images(tmp_path)
    for number in range(9):
        (tmp_path / "cat" / f"bad{number}.png").write_bytes(b"no image")
    with raises("unreadable_image", "and 6 more: `fedbicross check"):
        find_images(tmp_path)


# --- manifests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "path;label\nimg/a b.png;x,y\n",
        '"Path";"Label"\n"img/a b.png";"x,y"\n',
        'path,label\n"img/a b.png","x,y"\n',
        'path, label\n"img/a b.png", "x,y"\n',
        "path\tlabel\nimg/a b.png\tx,y\n",
        "label;path\nx,y;'img/a b.png'\n",
        "path;label\nimg\\a b.png;x,y\n",
    ],
)
def test_separators_quotes_and_backslashes(tmp_path, text):
    picture(tmp_path / "img" / "a b.png")
    (tmp_path / "m.csv").write_text(text)
    [entry] = scan_manifest(tmp_path / "m.csv").entries
    assert (entry.path, entry.label) == (tmp_path / "img" / "a b.png", "x,y")


def test_every_bad_line_is_found(tmp_path):
    (tmp_path / "m.csv").write_text("path,label,split\na.png,,train\n../b.png,x,test\nc.png,x,later\nd.png,x,Testing\n")
    found = scan_manifest(tmp_path / "m.csv")
    assert [(p.where, p.code) for p in found.problems] == [
        ("m.csv line 2", "bad_manifest"),
        ("m.csv line 3", "path_outside"),
        ("m.csv line 4", "bad_split"),
    ]
    assert [entry.split for entry in found.entries] == ["test"]


@pytest.mark.parametrize("backslash", [False, True])
def test_a_manifest_may_not_leave_its_folder_through_a_link(tmp_path, backslash):
    picture(tmp_path / "private" / "x.png")
    picture(tmp_path / "data" / "img" / "x.png")
    (tmp_path / "data" / "away").symlink_to(tmp_path / "private")
    (tmp_path / "data" / "away.png").symlink_to(tmp_path / "private" / "x.png")
    (tmp_path / "data" / "near").symlink_to("img")
    (tmp_path / "data" / "round").symlink_to("round")
    text = "path,label\naway/x.png,a\naway.png,a\nround/x.png,a\nimg/x.png,a\nnear/x.png,b\n"
    (tmp_path / "data" / "m.csv").write_text(text.replace("/", "\\") if backslash else text)
    (tmp_path / "linked").symlink_to("data")  # the manifest's own folder may be reached by one
    for folder in ("data", "linked"):
        found = scan_manifest(tmp_path / folder / "m.csv")
        assert [problem.code for problem in found.problems[:2]] == ["path_outside"] * 2
        assert [entry.label for entry in found.entries][-2:] == ["a", "b"]
        assert not any("away" in str(entry.path) for entry in found.entries)


def test_a_path_that_no_file_can_have(tmp_path):
    (tmp_path / "m.csv").write_text("path,label\na\0.png,a\n")
    with raises("unreadable_image"):
        find_images(tmp_path / "m.csv")


def test_a_manifest_without_a_header_quotes_no_patient(tmp_path):
    (tmp_path / "m.csv").write_text("img/Quixote_Alonso.png,melanoma,MRN-4711\n")
    with pytest.raises(DataError) as caught:
        scan_manifest(tmp_path / "m.csv")
    said = str(caught.value).lower()
    assert caught.value.code == "bad_manifest" and "3 columns" in said
    assert not any(word in said for word in ("quixote", "melanoma", "4711"))


def test_a_manifest_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "m.csv")
    with raises("not_a_file"):
        scan_manifest(tmp_path / "m.csv")
