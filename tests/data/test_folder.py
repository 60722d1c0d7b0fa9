from __future__ import annotations

import csv
import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from fedbicross.data import load_dataset
from fedbicross.data.folder import find_images, load_folder, read_images
from fedbicross.data.layout import scan_folder
from fedbicross.data.manifest import scan_manifest

from .helpers import raises, real_file


def picture(path, value=100, size=(12, 12), mode="L", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path, **options)
    return path


def class_folders(root, per_class=10, classes=("cat", "dog"), **options):
    for c, name in enumerate(classes):
        for i in range(per_class):
            picture(root / name / f"{i:02d}.png", 40 * c + i, **options)
    return root


def manifest(root, rows, columns=("path", "label"), name="data.csv"):
    with (root / name).open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])
    return root / name


# --- layouts -------------------------------------------------------------------------------------------------------


def test_class_folders_are_split_evenly(tmp_path):
    data = load_folder(class_folders(tmp_path / "pets"), 8)
    assert (data.name, data.classes, data.channels, data.image_size) == ("pets", ("cat", "dog"), 1, 8)
    assert np.bincount(data.test.labels).tolist() == [2, 2]
    again = load_folder(tmp_path / "pets", 8)
    assert again.digest() == data.digest()
    other = load_folder(tmp_path / "pets", 8, rng=np.random.default_rng(5))
    assert other.digest() != data.digest()
    # Labels follow their images: dogs were drawn lighter.
    assert data.train.images[data.train.labels == 0].max() <= 9 < 40 <= data.train.images[data.train.labels == 1].min()


def test_train_val_and_test_folders(tmp_path):
    for split, count in (("train", 5), ("val", 2), ("test", 3)):
        class_folders(tmp_path / split, count)
    data = load_folder(tmp_path, 8)
    assert (len(data.train), len(data.test)) == (14, 6)


def test_train_folder_without_test_is_split(tmp_path):
    class_folders(tmp_path / "train", 10)
    data = load_folder(tmp_path, 8, test_fraction=0.5)
    assert (len(data.train), len(data.test)) == (10, 10)


def test_nested_hidden_and_foreign_files(tmp_path):
    class_folders(tmp_path, 2)
    picture(tmp_path / "cat" / "deep" / "er" / "x.PNG")
    picture(tmp_path / "cat" / ".hidden.png")
    picture(tmp_path / ".git" / "x.png")
    picture(tmp_path / "__MACOSX" / "x.png")
    (tmp_path / "cat" / "notes.txt").write_text("hello")
    assert [e.label for e in scan_folder(tmp_path).entries] == ["cat"] * 3 + ["dog"] * 2


def test_manifest_with_everything(tmp_path):
    rows = []
    for i in range(12):
        picture(tmp_path / "img" / f"{i}.png", i)
        rows.append((f"img/{i}.png", "ab"[i % 2], f"p{i // 2}", f"s{i // 6}", ["train", "VAL", "test"][i // 4]))
    data = load_folder(manifest(tmp_path, rows, ("path", "label", "patient_id", "site", "split")), 12)
    assert (len(data.train), len(data.test), data.classes) == (8, 4, ("a", "b"))
    assert data.train.images[:, 0, 0, 0].tolist() == list(range(8))
    assert data.train.patients.tolist() == [f"p{i // 2}" for i in range(8)]
    assert data.train.sites.tolist() == [f"s{i // 6}" for i in range(8)]


def test_manifest_without_split_keeps_patients_whole_and_all_sites_tested(tmp_path):
    rows = []
    for i in range(80):
        picture(tmp_path / f"{i}.png", i)
        rows.append((f"{i}.png", f"c{i // 4 % 2}", f"p{i // 4}", f"s{i // 40}"))
    path = manifest(tmp_path, rows, ("path", "label", "patient_id", "site"))
    data = load_folder(path, 8, test_fraction=0.25)
    assert not set(data.train.patients) & set(data.test.patients)
    assert set(data.test.sites) == {"s0", "s1"} and set(data.test.labels) == {0, 1}
    assert len(data.test) in (16, 20, 24)


def test_manifest_bom_and_spaces(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "m.csv").write_bytes("\ufeffpath, label\r\n a.png , x \r\n".encode())
    [entry] = scan_manifest(tmp_path / "m.csv").entries
    assert (entry.path, entry.label) == (tmp_path / "a.png", "x")


# --- the conversion rule -------------------------------------------------------------------------------------------


def one(path, size=8):
    return read_images([path], size)[0]


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif"])
def test_formats(tmp_path, suffix):
    image = one(picture(tmp_path / f"x.{suffix}", 100))
    assert image.shape == (8, 8, 1) and abs(int(image.mean()) - 100) <= 1


def test_any_colour_makes_all_colour(tmp_path):
    grey, red = picture(tmp_path / "g.png", 50), picture(tmp_path / "r.png", (200, 0, 0), mode="RGB")
    images = read_images([grey, red], 8)
    assert images.shape == (2, 8, 8, 3)
    assert images[0, 0, 0].tolist() == [50, 50, 50] and images[1, 0, 0].tolist() == [200, 0, 0]


def test_greys_saved_in_colour_are_grey(tmp_path):
    grey, saved = picture(tmp_path / "g.png", 50), picture(tmp_path / "s.png", (60, 60, 60), mode="RGB")
    assert read_images([grey, saved], 8)[:, 0, 0].tolist() == [[50], [60]]
    assert read_images([saved], 8).flags.owndata, "no third of a larger array"
    hardly = picture(tmp_path / "h.png", (60, 60, 61), mode="RGB")
    assert read_images([saved, hardly], 8)[:, 0, 0].tolist() == [[60, 60, 60], [60, 60, 61]]


def test_alpha_lies_on_black(tmp_path):
    half = picture(tmp_path / "a.png", (200, 100, 0, 128), mode="RGBA")
    assert np.abs(one(half)[0, 0].astype(int) - [100, 50, 0]).max() <= 1
    assert one(picture(tmp_path / "la.png", (200, 128), mode="LA"))[0, 0].tolist() == [100]


def test_palette_becomes_rgb_with_transparency_on_black(tmp_path):
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    image.save(tmp_path / "p.png")
    assert one(tmp_path / "p.png")[0, 0].tolist() == [10, 200, 30]
    image.save(tmp_path / "t.png", transparency=1)
    assert one(tmp_path / "t.png")[0, 0].tolist() == [0]


def test_cmyk_and_bilevel(tmp_path):
    assert one(picture(tmp_path / "c.jpg", (0, 90, 90, 0), mode="CMYK")).shape == (8, 8, 3)
    assert one(picture(tmp_path / "b.png", 1, mode="1"))[0, 0].tolist() == [255]


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (257, 1), (32896, 128), (65535, 255)])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bit_uses_the_full_range(tmp_path, value, expected, suffix):
    Image.fromarray(np.full((9, 9), value, np.uint16)).save(tmp_path / f"x.{suffix}")
    assert one(tmp_path / f"x.{suffix}")[0, 0].tolist() == [expected]


def test_thirty_two_bit_and_float(tmp_path):
    Image.fromarray(np.full((9, 9), 65535, np.int32)).save(tmp_path / "ok.tif")
    assert one(tmp_path / "ok.tif").max() == 255
    Image.fromarray(np.full((9, 9), 65536, np.int32)).save(tmp_path / "big.tif")
    Image.fromarray(np.full((9, 9), 0.5, np.float32)).save(tmp_path / "f.tif")
    for name in ("big.tif", "f.tif"):
        with raises("unsupported_mode", name):
            one(tmp_path / name)


@pytest.mark.parametrize("size", [(40, 20), (20, 40), (8, 8), (5, 3), (1, 30)])
def test_shorter_side_then_centre_square(tmp_path, size):
    wide, high = size
    ramp = np.zeros((high, wide), np.uint8)
    middle = max(wide, high) // 2
    if wide >= high:
        ramp[:, :middle] = 255
    else:
        ramp[:middle] = 255
    Image.fromarray(ramp).save(tmp_path / "x.png")
    image = one(tmp_path / "x.png")
    assert image.shape == (8, 8, 1)
    if min(size) >= 8 and wide != high:  # the edge in the middle stays in the middle
        line = image[0, :, 0] if wide > high else image[:, 0, 0]
        assert line[:3].min() > 200 and line[5:].max() < 55


def test_downscaling_is_antialiased(tmp_path):
    stripes = np.tile(np.array([[0, 255]], np.uint8), (64, 32))
    Image.fromarray(stripes).save(tmp_path / "x.png")
    assert np.abs(one(tmp_path / "x.png").astype(int) - 128).max() < 10


def test_first_frame_and_rotation(tmp_path):
    frames = [Image.new("L", (8, 8), v) for v in (10, 200)]
    frames[0].save(tmp_path / "x.tif", save_all=True, append_images=frames[1:])
    assert one(tmp_path / "x.tif").max() == 10
    half = Image.fromarray(np.repeat(np.array([0, 255], np.uint8), 4)[:, None].repeat(8, 1))
    exif = half.getexif()
    exif[0x0112] = 3  # upside down
    half.save(tmp_path / "r.png", exif=exif)
    assert one(tmp_path / "r.png")[0, 0, 0] == 255


# --- refusals ------------------------------------------------------------------------------------------------------


def test_empty_one_class_and_missing(tmp_path):
    with raises("empty"):
        load_folder(tmp_path)
    with raises("missing_file"):
        load_folder(tmp_path / "no")
    with raises("missing_file"):
        load_folder(tmp_path / "no.csv")
    with raises("one_class", "cat"):
        load_folder(class_folders(tmp_path, classes=("cat",)))


def test_too_few_to_hold_out(tmp_path):
    with raises("empty", "too few"):
        load_folder(class_folders(tmp_path, 1))


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"hello", b"GIF89a"])
def test_unreadable_image_is_named(tmp_path, content):
    class_folders(tmp_path, 5)
    (tmp_path / "cat" / "bad.png").write_bytes(content)
    with raises("unreadable_image", "bad.png"):
        load_folder(tmp_path)


def test_truncated_image_is_named(tmp_path):
    class_folders(tmp_path, 5)
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(256, size=(64, 64), dtype=np.uint8)
    Image.fromarray(noise).save(stream, "PNG")
    (tmp_path / "cat" / "half.png").write_bytes(stream.getvalue()[:2000])
    with raises("unreadable_image", "half.png"):
        load_folder(tmp_path)


def test_pixel_limit_is_read_from_the_header(tmp_path):
    path = picture(tmp_path / "x.png", size=(100, 100))
    with raises("too_many_pixels", "100 x 100"):
        read_images([path], 8, max_pixels=9_999)
    huge = bytearray(path.read_bytes())
    huge[16:24] = (60_000).to_bytes(4, "big") * 2  # a header that promises 3.6 billion pixels
    import zlib

    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    path.write_bytes(huge)
    with raises("too_many_pixels"):
        read_images([path], 8)


def test_total_limit(tmp_path):
    path = picture(tmp_path / "x.png")
    with raises("too_large"):
        read_images([path] * 600, 4096)


@pytest.mark.parametrize("name", ["../x.png", "a/../../x.png", "/etc/x.png", "..\\x.png", "C:\\x.png", "C:x.png"])
def test_manifest_may_not_leave_its_folder(tmp_path, name):
    with raises("path_outside"):
        find_images(manifest(tmp_path, [(name, "a")]))


@pytest.mark.parametrize(
    ("code", "rows", "columns"),
    [
        ("bad_manifest", [("a.png",)], ("path",)),
        ("bad_manifest", [("a.png", "")], ("path", "label")),
        ("bad_manifest", [("a.png",)], ("path", "label")),
        ("bad_manifest", [("a.png", "x", "")], ("path", "label", "patient_id")),
        ("bad_split", [("a.png", "x", "sometimes")], ("path", "label", "split")),
        ("duplicate_path", [("a.png", "x"), ("./a.png", "y")], ("path", "label")),
    ],
)
def test_bad_manifests(tmp_path, code, rows, columns):
    with raises(code):
        find_images(manifest(tmp_path, rows, columns))


def test_manifest_not_text_or_naming_no_file(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00path")
    with raises("bad_manifest"):
        load_folder(tmp_path / "x.csv")
    rows = [(f"{i}.png", "ab"[i % 2]) for i in range(10)]
    with raises("missing_file", "0.png"):
        load_folder(manifest(tmp_path, rows))


def test_patient_in_train_and_test_is_refused(tmp_path):
    rows = []
    for i in range(4):
        picture(tmp_path / f"{i}.png", i)
        rows.append((f"{i}.png", "ab"[i % 2], "p", ["train", "test"][i // 2]))
    with raises("patient_in_both_splits", "'p'"):
        load_folder(manifest(tmp_path, rows, ("path", "label", "patient_id", "split")))


def test_bad_settings(tmp_path):
    class_folders(tmp_path, 5)
    with raises("bad_image_size"):
        load_folder(tmp_path, 3)
    for fraction in (0.0, 1.0, float("nan")):
        with raises("bad_test_fraction"):
            load_folder(tmp_path, test_fraction=fraction)


def test_real_chest_x_rays(tmp_path):
    with zipfile.ZipFile(real_file("kermany_cxr_224.zip")) as archive:
        names = [n for n in archive.namelist() if n.lower().endswith((".jpeg", ".jpg"))]
        archive.extractall(tmp_path, names[::150])
    root = tmp_path if (tmp_path / "train").is_dir() else next(p for p in tmp_path.iterdir() if p.is_dir())
    data = load_dataset(root, image_size=64)
    assert data.classes == ("NORMAL", "PNEUMONIA") and data.image_size == 64
    assert len(data.train) + len(data.test) == len(names[::150])
