"""NIfTI volumes through nibabel (extra ``nifti``): one volume becomes some of its axial slices, by one rule.

* The volume is turned to the standard axes (right, front, top) by its header; slices lie along the third axis.
* Every ``EVERY``-th slice, centred; those that are nearly empty (less than ``FILLED`` of their pixels brighter than
  ``BRIGHT`` of 255) are left out.
* The 0.5 and 99.5 percentiles of the whole volume become black and white; what is not finite becomes black.
* All slices of a volume are one patient. Pixels count as square, whatever the header says of millimetres.
"""

from __future__ import annotations

import gzip
import math
import zlib
from functools import cached_property
from pathlib import Path

import nibabel
import numpy as np
from nibabel.orientations import apply_orientation, io_orientation
from PIL import Image as pillow
from PIL.Image import Image

from fedbicross.data.files import open_regular
from fedbicross.errors import DataError

EVERY = 4
FILLED = 0.05
BRIGHT = 25
PERCENTILES = (0.5, 99.5)
MAX_BYTES = 2**30  # of a volume, unpacked
MAX_HEADER = 2**20  # bytes before the voxels
_SAMPLE = 2_000_000  # voxels looked at for the percentiles
_HEADERS = {348: nibabel.Nifti1Image, 540: nibabel.Nifti2Image}


class Volume:
    """A volume in memory, its slices made on demand."""

    def __init__(self, path: Path, max_pixels: int) -> None:
        self.path = path
        try:
            data, image = _read(path, max_pixels)
            stored = image.dataobj
            # A view of the bytes that were read: nibabel's own reading would copy them.
            raw = np.frombuffer(data, stored.dtype, math.prod(stored.shape), stored.offset)
            self.slope, self.intercept = float(stored.slope), float(stored.inter)
            turned = apply_orientation(raw.reshape(_cube(stored.shape), order="F"), io_orientation(image.affine))
        except DataError:
            raise
        except Exception as error:  # a damaged header can break nibabel anywhere
            raise DataError("unreadable_nifti", f"{path} cannot be read as NIfTI ({type(error).__name__})") from None
        self.voxels = np.asarray(turned)
        sample = self._scaled(self.voxels.flat[:: max(1, self.voxels.size // _SAMPLE)])  # reshape(-1) would copy all
        known = sample[np.isfinite(sample)]
        if not known.size:
            raise DataError("unreadable_nifti", f"{path} holds no finite values")
        self.low, self.high = np.percentile(known, PERCENTILES)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of a slice."""
        return int(self.voxels.shape[0]), int(self.voxels.shape[1])

    @cached_property
    def slices(self) -> list[int]:
        """The slices that the rule keeps."""
        depth = self.voxels.shape[2]
        chosen = range((depth - 1) % EVERY // 2, depth, EVERY)
        kept = [i for i in chosen if (self._grey(i) > BRIGHT).mean() >= FILLED]
        if not kept:
            raise DataError("empty_volume", f"{self.path}: every slice is nearly empty")
        return kept

    def decode(self, index: int) -> Image:
        """One slice: the front of the body at the top."""
        return pillow.fromarray(np.ascontiguousarray(self._grey(index).T[::-1]))

    def _grey(self, index: int) -> np.ndarray:
        values = self._scaled(self.voxels[:, :, index])
        values = np.where(np.isfinite(values), values, self.low)
        span = max(self.high - self.low, np.finfo(np.float64).tiny)
        grey: np.ndarray = np.rint(((values - self.low) / span * 255).clip(0, 255)).astype(np.uint8)
        return grey

    def _scaled(self, raw: np.ndarray) -> np.ndarray:
        return raw.astype(np.float64) * self.slope + self.intercept


def _read(path: Path, max_pixels: int) -> tuple[bytes, nibabel.Nifti1Image]:
    """The file's bytes, exactly as many as a bounded header promises, and what they say."""
    with open_regular(path) as file:
        stream = gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file
        try:
            start = stream.read(540)
            size = int.from_bytes(start[:4], "little")
            kind = _HEADERS.get(size) or _HEADERS.get(int.from_bytes(start[:4], "big"))
            if kind is None:
                raise DataError("unreadable_nifti", f"{path} does not start like a NIfTI file")
            header = kind.header_class(start[: kind.header_class.template_dtype.itemsize], check=True)
            wanted = _promised_bytes(path, header, max_pixels)
            stream.seek(0)  # and not start + rest, which would hold a large volume twice
            data = stream.read(max(wanted, 352))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError("unreadable_nifti", f"{path} cannot be unpacked ({type(error).__name__})") from None
    if len(data) < wanted:
        raise DataError("unreadable_nifti", f"{path} is cut off: {len(data):,} of {wanted:,} bytes")
    return data, kind.from_bytes(data)


def _promised_bytes(path: Path, header: nibabel.Nifti1Header, max_pixels: int) -> int:
    """Header and voxels together, refused before any of it is read if there are too many."""
    shape, dtype, offset = header.get_data_shape(), header.get_data_dtype(), int(header["vox_offset"])
    if dtype.kind not in "iuf":
        raise DataError("unsupported_nifti", f"{path} holds colours or complex numbers, which are not read")
    cube = _cube(shape)
    if len(cube) != 3:
        raise DataError("unsupported_nifti", f"{path} has the shape {list(shape)}; one volume of 3 dimensions is read")
    if min(cube) < 1 or not 0 <= offset <= MAX_HEADER:
        raise DataError("unreadable_nifti", f"{path} declares the shape {list(shape)} after {offset:,} bytes")
    total: int = offset + math.prod(cube) * dtype.itemsize
    if total > MAX_BYTES or cube[0] * cube[1] > max_pixels:
        raise DataError("too_many_pixels", f"{path} declares {' x '.join(map(str, cube))} voxels, {total:,} bytes")
    return total


def _cube(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Three dimensions: trailing ones dropped, missing ones added."""
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    return shape + (1,) * (3 - len(shape))
