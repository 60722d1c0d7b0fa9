"""One rule for every image, so that sites convert alike:

* png, jpg, bmp and tif; the first frame or page; EXIF rotation applied; at most 64 million pixels, checked before
  decoding; DICOM and NIfTI by the rules of ``data.dicom`` and ``data.nifti``;
* transparency is laid on black; palettes, CMYK and the like become RGB; 16-bit grey becomes v / 257;
* if every image is grey the dataset has 1 channel, if any has colour all have 3; greys saved as colour, as X-rays often
  are, count as grey (three equal channels would let a synthesis paint images in colours that no network ever saw);
* resized with antialiasing until the shorter side is ``image_size``, then the centre square is kept.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image as pillow
from PIL import ImageOps, UnidentifiedImageError

from fedbicross.data.files import Kind, kind_of, open_regular
from fedbicross.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from fedbicross.data.dataset import Images
    from fedbicross.data.dicom import Dicom
    from fedbicross.data.nifti import Volume

MAX_PIXELS = 64_000_000
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF")  # whatever the suffix says, no other decoder is run
_GREY = frozenset({"1", "L", "LA", "I", "I;16", "I;16L", "I;16B", "I;16N"})
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, MemoryError)  # what Pillow raises on damaged files
_PACKAGES = {"dicom": "pydicom", "nifti": "nibabel"}


@dataclass(frozen=True)
class Header:
    """What is known of an image before it is decoded."""

    kind: Kind
    width: int
    height: int
    mode: str
    slice: int | None = None  # of a volume
    patient: Hashable = field(default=None, repr=False)  # tells patients apart while loading; never stored or shown

    @property
    def grey(self) -> bool:
        """Whether the image has no colour."""
        return self.mode in _GREY


class Reader:
    """Opens images of any known kind. Keeps the last volume, whose slices are asked for one after the other."""

    def __init__(self, max_pixels: int = MAX_PIXELS) -> None:
        self.max_pixels = max_pixels
        self._last: tuple[Path, Volume] | None = None

    def look(self, path: Path) -> list[Header]:
        """The headers of a file's images: one, or one a slice that is used."""
        kind = kind_of(path)
        if kind == "dicom":
            dicom = self._dicom(path)
            return [Header("dicom", dicom.width, dicom.height, dicom.mode, patient=dicom.patient)]
        if kind == "nifti":
            volume = self._volume(path)
            return [Header("nifti", *volume.size, "L", index, str(path)) for index in volume.slices]
        with self._image(path) as image:
            return [Header("image", image.width, image.height, image.mode)]

    @contextmanager
    def decoded(self, path: Path, index: int | None = None) -> Iterator[Image]:
        """The image with its pixels; ``index`` is the slice of a volume."""
        kind = kind_of(path)
        if kind == "dicom":
            yield self._dicom(path).decode()
        elif kind == "nifti":
            if index is None:
                raise DataError("which_slice", f"{path} is a volume, not a single image")
            yield self._volume(path).decode(index)
        else:
            with self._image(path) as image:
                try:
                    image.load()
                except _BROKEN as error:
                    raise DataError("unreadable_image", f"{path} cannot be decoded ({error})") from error
                yield image

    def _dicom(self, path: Path) -> Dicom:
        require("dicom", path)
        from fedbicross.data.dicom import Dicom

        return Dicom(path, self.max_pixels)

    def _volume(self, path: Path) -> Volume:
        if self._last is None or self._last[0] != path:
            require("nifti", path)
            from fedbicross.data.nifti import Volume

            self._last = None  # two large volumes need not be in memory at once
            self._last = path, Volume(path, self.max_pixels)
        return self._last[1]

    @contextmanager
    def _image(self, path: Path) -> Iterator[Image]:
        """Open a file and look at its header only."""
        with open_regular(path) as stream:
            try:
                image = pillow.open(stream, formats=_FORMATS)
            except pillow.DecompressionBombError as error:
                raise DataError("too_many_pixels", f"{path} is too large ({error})") from error
            except UnidentifiedImageError as error:
                kinds = ", ".join(_FORMATS)
                raise DataError("unreadable_image", f"{path} is not a readable image (none of {kinds})") from error
            except _BROKEN as error:
                raise DataError("unreadable_image", f"{path} is not a readable image ({error})") from error
            with image:
                if image.width * image.height > self.max_pixels:
                    size = f"{image.width} x {image.height}"
                    raise DataError("too_many_pixels", f"{path} has {size} pixels; the limit is {self.max_pixels:,}")
                yield image


def require(kind: str, path: Path) -> None:
    """Refuse a kind of file whose package is not installed."""
    package = _PACKAGES[kind]
    if importlib.util.find_spec(package) is None:
        raise DataError(f"needs_{kind}", f"{path} needs the package {package}: pip install 'fedbicross[{kind}]'")


def has_colour(pixels: Images) -> bool:
    """Whether a picture shows more than greys, however it was saved."""
    return bool((pixels != pixels[..., :1]).any())


def convert(image: Image, size: int, grey: bool, path: Path) -> Images:
    """Grey or RGB [size, size, channels] by the rule of the module."""
    try:
        return _convert(image, size, grey, path)
    except _BROKEN as error:
        raise DataError("unreadable_image", f"{path} cannot be decoded ({error})") from error


def eight_bit(image: Image, path: Path) -> Image:
    """Upright, opaque, with 8 bits a channel."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise DataError("unsupported_mode", f"{path} holds floating-point pixels, whose range is unknown")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise DataError("unsupported_mode", f"{path} holds values outside 0..65535")
        image = pillow.fromarray(np.rint(values / 257).astype(np.uint8))
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        clear = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", clear.size, (0, 0, 0, 255)), clear)
    return image


def _convert(image: Image, size: int, grey: bool, path: Path) -> Images:
    image = eight_bit(image, path).convert("L" if grey else "RGB")
    scale = size / min(image.size)
    wide, high = (max(size, round(length * scale)) for length in image.size)
    image = image.resize((wide, high), pillow.Resampling.BICUBIC)
    left, top = (wide - size) // 2, (high - size) // 2
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.uint8)
    return pixels[..., None] if grey else pixels
