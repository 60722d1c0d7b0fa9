"""Scanner shift: the same kind of image seen through another hospital's stain, lamp, lens and sensor.

Colour images are changed in optical density (-log of the light let through), where a stain is a straight line and a
3×3 matrix is a change of stain; grey images take contrast, brightness, blur and noise only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbicross.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedbicross.data.dataset import Images, Indices

_CHUNK = 512
_SPLITS = ("train", "test")


@dataclass(frozen=True)
class ScannerShift:
    """One client's scanner; all zeros and the unit matrix change nothing."""

    matrix: tuple[tuple[float, float, float], ...]  # of optical densities, row = output channel
    contrast: float  # gain around mid-grey, 0 = unchanged
    brightness: float  # added, in grey levels
    blur: float  # weight of each neighbour, 0 to 1/3
    noise: float  # standard deviation in grey levels
    seed: int  # of the noise

    def apply(self, images: Images, indices: Indices, split: str) -> Images:
        """Shift images; each one's noise depends only on (seed, split, its index), not on its companions."""
        out = np.empty_like(images)
        for start in range(0, len(images), _CHUNK):
            stop = start + _CHUNK
            out[start:stop] = self._apply(images[start:stop], indices[start:stop], split)
        return out

    def _apply(self, images: Images, indices: Indices, split: str) -> Images:
        light = images.astype(np.float64)
        if images.shape[3] == 3:
            density = -np.log((light + 1) / 256)
            light = 256 * np.exp(-np.maximum(density @ np.array(self.matrix).T, 0)) - 1
        light = (light - 128) * (1 + self.contrast) + 128 + self.brightness
        light = _blur(_blur(light, self.blur, 1), self.blur, 2)
        if self.noise > 0:
            for row, index in enumerate(indices):
                rng = np.random.default_rng((self.seed, _SPLITS.index(split), int(index)))
                light[row] += self.noise * rng.standard_normal(light.shape[1:])
        return np.clip(np.rint(light), 0, 255).astype(np.uint8)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return asdict(self) | {"matrix": [list(row) for row in self.matrix]}

    @classmethod
    def from_json(cls, obj: Any) -> ScannerShift:
        """The inverse of ``to_json``; anything else is refused."""
        try:
            matrix = tuple(tuple(float(value) for value in row) for row in obj["matrix"])
            numbers = {f.name: float(obj[f.name]) for f in fields(cls) if f.name not in ("matrix", "seed")}
            seed = int(obj["seed"])
        except (TypeError, KeyError, ValueError) as error:
            raise DataError("partition_format", f"a scanner entry is malformed ({error!r})") from error
        finite = all(map(math.isfinite, [*numbers.values(), *(value for row in matrix for value in row)]))
        if [len(row) for row in matrix] != [3, 3, 3] or not finite or seed < 0 or not 0 <= numbers["blur"] <= 1 / 3:
            raise DataError("partition_format", "a scanner entry holds impossible values")
        a, b, c = ((row[0], row[1], row[2]) for row in matrix)
        return cls((a, b, c), seed=seed, **numbers)


def draw_scanner(rng: np.random.Generator, strength: float) -> ScannerShift:
    """A random scanner; strength 1 is a plain but readable difference between hospitals, 0 none."""
    # Rows keep their sum near 1, so that colours move more than lightness does.
    matrix = np.eye(3) + strength * rng.uniform(-0.22, 0.22, (3, 3))
    matrix *= ((1 + strength * rng.uniform(-0.15, 0.15, 3)) / matrix.sum(axis=1))[:, None]
    rows = [(float(a), float(b), float(c)) for a, b, c in matrix]
    return ScannerShift(
        (rows[0], rows[1], rows[2]),
        contrast=float(strength * rng.uniform(-0.2, 0.2)),
        brightness=float(strength * rng.uniform(-18, 18)),
        blur=float(min(strength * rng.uniform(0, 0.2), 1 / 3)),
        noise=float(strength * rng.uniform(0, 8)),
        seed=int(rng.integers(2**31)),
    )


def _blur(light: NDArray[np.float64], weight: float, axis: int) -> NDArray[np.float64]:
    """Three-tap blur along one axis; the border repeats."""
    if weight == 0:
        return light
    n = light.shape[axis]
    below = np.take(light, np.maximum(np.arange(n) - 1, 0), axis)
    above = np.take(light, np.minimum(np.arange(n) + 1, n - 1), axis)
    mixed: NDArray[np.float64] = (1 - 2 * weight) * light + weight * (below + above)
    return mixed
