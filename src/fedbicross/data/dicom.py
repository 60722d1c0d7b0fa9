"""DICOM files through pydicom (extra ``dicom``): one picture of 8 bits a file, by one rule for every site.

* Stored values become the modality's (rescale slope and intercept, or its table), then grey by the first VOI window of
  the file; without a usable window by its VOI table; without that the 0.5 and 99.5 percentiles become black and white,
  padding left out. Then ``MONOCHROME1`` is inverted, so that more always means brighter.
* ``RGB``, ``YBR`` and palettes become RGB.
* One frame a file. Uncompressed files, RLE, JPEG and JPEG 2000; what needs other decoders is refused by its name,
  whatever is installed: all sites read the same files, and of other decoders it is not known what they allocate.

Of the patient nothing is kept but a key that lives as long as the loading (``data.patients``). What pydicom says of a
file may quote its tags, so its words are never passed on.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from PIL import Image as pillow
from PIL.Image import Image
from pydicom.dataset import Dataset
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi, apply_windowing
from pydicom.pixels.utils import pixel_array
from pydicom.uid import DeflatedExplicitVRLittleEndian, RLELossless

from fedbicross.data.files import read_regular
from fedbicross.errors import DataError

MAX_FILE = 512 * 2**20  # bytes
MAX_RLE = 16 * 2**20  # bytes; run lengths unpack to at most 64 times as many, before any size is compared
PERCENTILES = (0.5, 99.5)
_GREY = ("MONOCHROME1", "MONOCHROME2")
_COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT", "PALETTE COLOR")
_PALETTE = ("Red", "Green", "Blue", "Alpha")


class Dicom:
    """A DICOM file whose header was read and found to be one bounded picture. Its pixels are not yet decoded."""

    def __init__(self, path: Path, max_pixels: int) -> None:
        self.path = path
        data = read_regular(path, MAX_FILE)
        if DeflatedExplicitVRLittleEndian.encode() in data:  # pydicom would inflate it whole, however large
            raise _unsupported_syntax(path, DeflatedExplicitVRLittleEndian.name)
        with self._hiding():
            self.dataset = pydicom.dcmread(io.BytesIO(data))  # from memory: a false length cannot ask for more than it
            self._check(max_pixels)
            issuer, name = (str(self.dataset.get(tag) or "").strip() for tag in ("IssuerOfPatientID", "PatientID"))
            # For telling patients apart while images are loaded. Never to be stored or shown.
            self.patient = (issuer, name) if name else None

    def _check(self, max_pixels: int) -> None:
        dataset, path = self.dataset, self.path
        if "PixelData" not in dataset:
            raise DataError("no_pixels", f"{path} is DICOM but holds no picture")
        self.height, self.width = int(dataset.Rows), int(dataset.Columns)
        frames, samples = int(dataset.get("NumberOfFrames") or 1), int(dataset.get("SamplesPerPixel") or 1)
        bits = int(dataset.BitsAllocated)
        if min(self.height, self.width) < 1:
            raise DataError("unreadable_dicom", f"{path} declares {self.width} x {self.height} pixels")
        if frames * self.height * self.width > max_pixels:
            size = f"{self.width} x {self.height} pixels" + (f" in {frames} frames" if frames > 1 else "")
            raise DataError("too_many_pixels", f"{path} declares {size}; the limit is {max_pixels:,}")
        if frames != 1:
            raise DataError("multi_frame", f"{path} holds {frames} frames; export each as a file, or use NIfTI")
        self.photometric = str(dataset.PhotometricInterpretation)
        palette = self.photometric == "PALETTE COLOR"
        grey = self.photometric in _GREY
        wanted = 1 if grey or palette else 3
        if (
            not (grey or self.photometric in _COLOUR)
            or samples != wanted
            or bits not in ((8, 16) if wanted == 1 else (8,))
        ):
            kind = self.photometric[:20]
            raise DataError("unsupported_dicom", f"{path} holds {samples} x {bits} bits of {kind!r}, which is not read")
        if palette and any(f"Segmented{name}PaletteColorLookupTableData" in dataset for name in _PALETTE):
            # A few bytes of it can ask for gigabytes, and pydicom expands them all.
            raise DataError("unsupported_dicom", f"{path} holds a palette in segments, which is not read")
        self.mode = "L" if grey else "RGB"
        syntax = dataset.file_meta.TransferSyntaxUID
        length = len(dataset.PixelData)
        each = 2 if self.photometric == "YBR_FULL_422" else samples  # of which two pixels share two values
        if not syntax.is_compressed and length < self.height * self.width * each * bits // 8:
            raise DataError("unreadable_dicom", f"{path} is cut off: {length:,} bytes of pixels are too few")
        if syntax == RLELossless and length > MAX_RLE:
            raise DataError("too_large", f"{path} has {length:,} bytes of run lengths; the limit is {MAX_RLE:,}")
        self.decoder = ("pydicom" if syntax == RLELossless else "pillow") if syntax.is_compressed else ""
        try:
            known = get_decoder(syntax)
        except NotImplementedError:
            raise _unsupported_syntax(path, syntax.name) from None
        if self.decoder and self.decoder not in known.available_plugins:
            raise _unsupported_syntax(path, syntax.name)

    def decode(self) -> Image:
        """The picture, "L" or "RGB"."""
        with self._hiding():
            stored = pixel_array(self.dataset, decoding_plugin=self.decoder)  # YBR becomes RGB
            if stored.shape[:2] != (self.height, self.width):
                raise DataError("unreadable_dicom", f"{self.path} holds another size than its header says")
            if self.photometric == "PALETTE COLOR":
                coloured = apply_color_lut(stored, self.dataset)
                return pillow.fromarray((coloured >> (8 * (coloured.itemsize - 1))).astype(np.uint8))
            if self.mode == "RGB":
                return pillow.fromarray(stored.astype(np.uint8))
            grey = np.rint(self._windowed(stored)).astype(np.uint8)
            return pillow.fromarray(255 - grey if self.photometric == "MONOCHROME1" else grey)

    def _windowed(self, stored: np.ndarray) -> np.ndarray:
        """Stored values to 0..255 as the file's own window shows them."""
        dataset = self.dataset
        values = apply_modality_lut(stored, dataset).astype(np.float64)
        if not np.isfinite(values).all():
            raise DataError("unreadable_dicom", f"{self.path} is rescaled to values that are not finite")
        centre, width = _first(dataset.get("WindowCenter")), _first(dataset.get("WindowWidth"))
        function = str(dataset.get("VOILUTFunction") or "LINEAR")
        if centre is not None and width is not None and (width >= 1 or (function != "LINEAR" and width > 0)):
            view = Dataset()  # a screen of 8 bits: what pydicom scales the window to
            view.PhotometricInterpretation, view.BitsStored, view.PixelRepresentation = "MONOCHROME2", 8, 0
            view.WindowCenter, view.WindowWidth, view.VOILUTFunction = centre, width, function
            return np.asarray(apply_windowing(values, view)).clip(0, 255)
        if dataset.get("VOILUTSequence"):
            bits = int(dataset.VOILUTSequence[0].LUTDescriptor[2])
            shown = apply_voi(values.astype(np.int64), dataset)
            return np.asarray(shown / (2**bits - 1) * 255).clip(0, 255)
        padding = dataset.get("PixelPaddingValue")
        known = values if padding is None else values[stored != padding]
        return stretch(values, known if known.size else values)

    @contextmanager
    def _hiding(self) -> Iterator[None]:
        """Whatever pydicom or a decoder raises, warns or logs becomes one line that quotes nothing of the file."""
        log = logging.getLogger("pydicom")
        before, log.disabled = log.disabled, True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("error", pillow.DecompressionBombWarning)  # a JPEG may be larger than its header
                yield
        except (DataError, KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:  # parsers of damaged input raise anything
            kind = type(error).__name__
            raise DataError("unreadable_dicom", f"{self.path} cannot be read as DICOM ({kind})") from None
        finally:
            log.disabled = before


def stretch(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The percentiles of the known values to 0 and 255; a picture of one value becomes black."""
    low, high = np.percentile(known, PERCENTILES)
    return np.asarray((values - low) / max(high - low, np.finfo(np.float64).tiny) * 255).clip(0, 255)


def _first(value: Any) -> float | None:
    """The first of several windows; none if it is missing or no number."""
    try:
        number = float(value[0] if isinstance(value, list | pydicom.multival.MultiValue) else value)
    except (TypeError, ValueError, IndexError):
        return None
    return number if np.isfinite(number) else None


def _unsupported_syntax(path: Path, name: str) -> DataError:
    hint = "decompress it first, e.g. with `gdcmconv --raw` or `dcmdjpeg`"
    return DataError("transfer_syntax", f"{path} is packed as {name[:80]!r}, which is not read; {hint}")
