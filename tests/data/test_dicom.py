from __future__ import annotations

import io

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.processing import apply_voi_lut
from pydicom.sequence import Sequence
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLosslessSV1,
    RLELossless,
)

from fedbicross.data import load_dataset
from fedbicross.data import pictures as pictures_module
from fedbicross.data.folder import find_images, read_images

from .helpers import raises
from .scans import dicom

RAMP = np.linspace(0, 4000, 64, dtype=np.int16).reshape(8, 8)


def one(path, size=8):
    return read_images([path], size)[0]


def test_rescale_and_the_first_of_several_windows(tmp_path):
    tags = {"RescaleSlope": 2, "RescaleIntercept": -1000, "WindowCenter": [300, 9999], "WindowWidth": [401, 5]}
    got = one(dicom(tmp_path / "x.dcm", RAMP, **tags))[..., 0]
    values = RAMP.astype(float) * 2 - 1000
    expected = (((values - 299.5) / 400 + 0.5) * 255).clip(0, 255)  # PS3.3 C.11.2.1.2.1
    assert np.abs(got - expected).max() <= 0.5
    assert {0, 255} < set(got.ravel().tolist()), "some are below, some above and some inside of the window"


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_every_window_function_is_pydicoms(tmp_path, function):
    values = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    path = dicom(tmp_path / "x.dcm", values, WindowCenter=100, WindowWidth=60, VOILUTFunction=function)
    assert np.abs(one(path)[..., 0] - apply_voi_lut(values, pydicom.dcmread(path))).max() <= 0.5


@pytest.mark.parametrize("window", [{}, {"WindowCenter": 10, "WindowWidth": 0}, {"WindowCenter": 10}])
def test_without_a_usable_window_percentiles(tmp_path, window):
    values = RAMP.copy()
    got = one(dicom(tmp_path / "x.dcm", values, **window))[..., 0]
    low, high = np.percentile(values, (0.5, 99.5))
    assert np.abs(got - ((values - low) / (high - low) * 255).clip(0, 255)).max() <= 0.5


def test_padding_does_not_count(tmp_path):
    values = RAMP.copy()
    values[:4] = -2000
    plain = one(dicom(tmp_path / "a.dcm", values))[4:, :, 0]
    padded = one(dicom(tmp_path / "b.dcm", values, PixelPaddingValue=-2000))
    assert plain.min() > 60, "padding takes up the dark half"
    assert padded[4:].min() == 0 and padded[:4].max() == 0


def test_voi_table(tmp_path):
    table = Dataset()
    table.add_new("LUTDescriptor", "US", [256, 0, 16])
    table.add_new("LUTData", "OW", (65535 - 257 * np.arange(256)).astype("<u2").tobytes())
    values = np.arange(64, dtype=np.uint8).reshape(8, 8)
    path = dicom(tmp_path / "x.dcm", values, VOILUTSequence=Sequence([table]))
    assert one(path)[..., 0].tolist() == (255 - values).tolist()


def test_monochrome1_is_inverted(tmp_path):
    values = np.arange(64, dtype=np.uint8).reshape(8, 8)
    window = {"WindowCenter": 128, "WindowWidth": 256}
    bright = one(dicom(tmp_path / "a.dcm", values, **window)).astype(int)
    dark = one(dicom(tmp_path / "b.dcm", values, PhotometricInterpretation="MONOCHROME1", **window))
    assert (bright + dark == 255).all()


def test_colour(tmp_path):
    red = np.zeros((8, 8, 3), np.uint8)
    red[..., 0] = 200
    assert one(dicom(tmp_path / "rgb.dcm", red))[0, 0].tolist() == [200, 0, 0]
    ybr = np.zeros((8, 8, 3), np.uint8) + np.array([60, 94, 228], np.uint8)  # of the same red
    path = dicom(tmp_path / "ybr.dcm", ybr, PhotometricInterpretation="YBR_FULL")
    assert np.abs(one(path)[0, 0].astype(int) - [200, 0, 0]).max() <= 2


def test_palette(tmp_path):
    tags = {"PhotometricInterpretation": "PALETTE COLOR"}
    for name, level in (("Red", 10), ("Green", 200), ("Blue", 30)):
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [256, 0, 8]
        tags[f"{name}PaletteColorLookupTableData"] = bytes([level] * 256)
    assert one(dicom(tmp_path / "x.dcm", np.ones((8, 8), np.uint8), **tags))[0, 0].tolist() == [10, 200, 30]


def test_compressed(tmp_path):
    values = np.random.default_rng(0).integers(256, size=(16, 16), dtype=np.uint8)
    window = {"WindowCenter": 128, "WindowWidth": 256}
    plain = dicom(tmp_path / "a.dcm", values, **window)
    packed = pydicom.dcmread(plain)
    packed.compress(RLELossless)
    packed.save_as(tmp_path / "rle.dcm")
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "JPEG2000")
    made = pydicom.dcmread(plain)
    made.PixelData, made.file_meta.TransferSyntaxUID = encapsulate([stream.getvalue()]), JPEG2000Lossless
    made.save_as(tmp_path / "j2k.dcm")
    images = read_images([plain, tmp_path / "rle.dcm", tmp_path / "j2k.dcm"], 16)
    assert (images == images[0]).all()


# --- patients ------------------------------------------------------------------------------------------------------


def scans(root, patients=12, each=3, split=lambda patient: ""):
    rng = np.random.default_rng(0)
    for patient in range(patients):
        label = "ab"[patient % 2]
        for number in range(each):
            values = rng.integers(1000, size=(9, 9), dtype=np.uint16)
            place = root / split(patient) / label / f"{patient}-{number}"  # without an ending, as archives export
            dicom(place, values, f"MRN-{patient:04d}")
    return root


def test_patients_stay_together_and_are_numbers(tmp_path):
    data = load_dataset(scans(tmp_path / "d"), image_size=8)
    assert not set(data.train.patients) & set(data.test.patients)
    assert len(set(data.train.patients)) + len(set(data.test.patients)) == 12
    assert {str(name).partition("-")[0] for name in data.train.patients} == {"patient"}
    assert load_dataset(tmp_path / "d", image_size=8).digest() == data.digest(), "resume finds the same data"


def test_a_patient_in_both_sets(tmp_path):
    scans(tmp_path / "d", 6, split=lambda patient: "train")
    dicom(tmp_path / "d" / "test" / "a" / "x.dcm", RAMP, "MRN-0000")
    dicom(tmp_path / "d" / "test" / "b" / "y.dcm", RAMP + 1, "MRN-0777")
    with raises("patient_in_both_splits", "--accept patient_in_both_splits"):
        load_dataset(tmp_path / "d", image_size=8)
    data = load_dataset(tmp_path / "d", image_size=8, accept=["patient_in_both_splits"])
    assert data.train.patients is None and "accepted" in data.note


def test_the_same_number_from_two_issuers_is_two_patients(tmp_path):
    for issuer in "xy":
        dicom(tmp_path / "a" / f"{issuer}.dcm", RAMP, "1", IssuerOfPatientID=issuer)
    entries = find_images(tmp_path)[0].entries
    assert [entry.patient for entry in entries] == ["patient-0", "patient-1"]


def test_missing_and_placeholder_patients(tmp_path):
    for number in range(3):
        dicom(tmp_path / "same" / "a" / f"{number}.dcm", RAMP, "ANONYMOUS")
        dicom(tmp_path / "none" / "a" / f"{number}.dcm", RAMP, None)
        dicom(tmp_path / "some" / "a" / f"{number}.dcm", RAMP, "P" if number else None)
    for kind, expected in (("same", [None] * 3), ("none", [None] * 3), ("some", ["patient-0"] + ["patient-1"] * 2)):
        assert [entry.patient for entry in find_images(tmp_path / kind)[0].entries] == expected, kind


def test_a_manifest_says_who_is_who(tmp_path):
    rows = ["path;label;patient_id;site"]
    for number in range(4):
        dicom(tmp_path / f"{number}.dcm", RAMP, "same")
        rows.append(f"{number}.dcm;{'ab'[number % 2]};p{number};north")
    (tmp_path / "m.csv").write_text("\n".join(rows))
    entries = find_images(tmp_path / "m.csv")[0].entries
    assert [(entry.patient, entry.site) for entry in entries] == [(f"p{i}", "north") for i in range(4)]


def test_a_header_does_not_show_the_patient(tmp_path):
    [header] = pictures_module.Reader().look(dicom(tmp_path / "x.dcm", RAMP, "MRN-4711"))
    assert header.patient == ("", "MRN-4711") and "4711" not in f"{header!r} {header}"


def test_institutions_are_not_taken_over(tmp_path):
    assert load_dataset(scans(tmp_path / "d"), image_size=8).train.sites is None


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "tags"),
    [
        ("too_many_pixels", {"Rows": 60000, "Columns": 60000}),
        ("too_many_pixels", {"NumberOfFrames": 2_000_000}),
        ("multi_frame", {"NumberOfFrames": 2}),
        ("unreadable_dicom", {"Rows": 9}),
        ("unreadable_dicom", {"Rows": 0}),
        ("unreadable_dicom", {"Rows": None}),
        ("unreadable_dicom", {"PhotometricInterpretation": None}),
        ("unreadable_dicom", {"RescaleSlope": 1e308, "RescaleIntercept": 0}),
        ("unsupported_dicom", {"PhotometricInterpretation": "HSV"}),
        ("unsupported_dicom", {"BitsAllocated": 32, "BitsStored": 32, "HighBit": 31}),
        ("unsupported_dicom", {"SamplesPerPixel": 4}),
        ("no_pixels", {"PixelData": None}),
    ],
)
def test_what_is_not_one_picture(tmp_path, code, tags):
    with raises(code, "x.dcm"):
        one(dicom(tmp_path / "x.dcm", RAMP, **tags))


@pytest.mark.parametrize(
    ("syntax", "name"), [(JPEGLosslessSV1, "JPEG Lossless"), (DeflatedExplicitVRLittleEndian, "Deflated")]
)
def test_transfer_syntax_is_named(tmp_path, syntax, name):
    path = dicom(tmp_path / "x.dcm", RAMP)
    made = pydicom.dcmread(path)
    if syntax.is_encapsulated:
        made.PixelData = encapsulate([b"\0" * 64])
    made.file_meta.TransferSyntaxUID = syntax
    made.save_as(path)
    with raises("transfer_syntax", name):
        one(path)


@pytest.mark.parametrize(
    ("syntax", "code"),
    [
        (JPEGLosslessSV1, "transfer_syntax"),  # which only other decoders read
        (JPEG2000Lossless, "unreadable_dicom"),  # where pydicom would try the next decoder after Pillow
        (RLELossless, "unreadable_dicom"),
    ],
)
def test_no_other_decoder_is_run_whatever_is_installed(tmp_path, monkeypatch, syntax, code):
    ran = []

    def decode(source, runner):
        ran.append(runner)
        return bytes(RAMP.nbytes)

    monkeypatch.setitem(get_decoder(syntax)._available, "pylibjpeg", decode)
    path = dicom(tmp_path / "x.dcm", RAMP)
    made = pydicom.dcmread(path)
    made.PixelData, made.file_meta.TransferSyntaxUID = encapsulate([b"\0" * 64]), syntax
    made.save_as(path)
    with raises(code):
        one(path)
    assert not ran


@pytest.mark.parametrize("whole", [False, True])
def test_palettes_in_segments_are_not_expanded(tmp_path, monkeypatch, whole):
    """Each segment of 6 bytes asks for 65,535 entries."""

    def expanded(*given):
        raise AssertionError("expanded")

    monkeypatch.setattr("pydicom.pixels.processing._expand_segmented_lut", expanded)
    tags = {"PhotometricInterpretation": "PALETTE COLOR"}
    for name in ("Red", "Green", "Blue"):
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        tags[f"Segmented{name}PaletteColorLookupTableData"] = np.array([1, 65535, 7] * 100, "<u2").tobytes()
        if whole:
            tags[f"{name}PaletteColorLookupTableData"] = bytes(512)
    with raises("unsupported_dicom", "segments"):
        one(dicom(tmp_path / "x.dcm", np.ones((8, 8), np.uint8), **tags))


def test_wrong_transfer_syntax(tmp_path):
    path = dicom(tmp_path / "x.dcm", RAMP)
    made = pydicom.dcmread(path)
    made.PixelData, made.file_meta.TransferSyntaxUID = encapsulate([b"no JPEG 2000 at all."]), JPEG2000Lossless
    made.save_as(path)
    with raises("unreadable_dicom", "x.dcm"):
        one(path)


def test_a_packed_picture_larger_than_its_header_says(tmp_path):
    path, stream = dicom(tmp_path / "x.dcm", RAMP.astype(np.uint8)), io.BytesIO()
    Image.new("L", (40, 40), 7).save(stream, "JPEG2000")
    made = pydicom.dcmread(path)
    made.PixelData, made.file_meta.TransferSyntaxUID = encapsulate([stream.getvalue()]), JPEG2000Lossless
    made.save_as(path)
    with raises("unreadable_dicom"):
        one(path)


def test_run_lengths_are_bounded(tmp_path, monkeypatch):
    packed = pydicom.dcmread(dicom(tmp_path / "x.dcm", RAMP))
    packed.compress(RLELossless)
    packed.save_as(tmp_path / "x.dcm")
    monkeypatch.setattr("fedbicross.data.dicom.MAX_RLE", 10)
    with raises("too_large", "run lengths"):
        one(tmp_path / "x.dcm")


def test_file_size_is_bounded(tmp_path, monkeypatch):
    path = dicom(tmp_path / "x.dcm", RAMP)
    monkeypatch.setattr("fedbicross.data.dicom.MAX_FILE", 100)
    with raises("too_large"):
        one(path)


def test_truncated_anywhere_is_an_error_that_quotes_nobody(tmp_path):
    path = dicom(tmp_path / "x.dcm", RAMP, WindowCenter=1, WindowWidth=2)
    whole = path.read_bytes()
    for length in [*range(0, len(whole) - 1, 7)]:
        path.write_bytes(whole[:length])
        with pytest.raises(pictures_module.DataError) as caught:
            one(path)
        assert "Quixote" not in str(caught.value) and "4711" not in str(caught.value)


def test_damaged_bytes_never_crash_and_quote_nobody(tmp_path, capfd, caplog):
    path = dicom(tmp_path / "x.dcm", RAMP, WindowCenter=1, WindowWidth=2)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(whole)
        for place in rng.integers(128, len(whole), 3):
            broken[place] = rng.integers(256)
        path.write_bytes(broken)
        try:
            one(path)
        except pictures_module.DataError as error:
            assert "Quixote" not in str(error) and "4711" not in str(error)
    said = capfd.readouterr()
    assert said.out + said.err + caplog.text == "", "pydicom's warnings quote what they complain of"


def test_the_extra_is_named(tmp_path, monkeypatch):
    path = dicom(tmp_path / "x.dcm", RAMP)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises("needs_dicom", "fedbicross[dicom]"):
        one(path)
