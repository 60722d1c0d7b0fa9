"""``cells``: stained blood cells drawn by formula, so that everything runs without a download.

Eight kinds with BloodMNIST's names and class shares. They differ as real ones do: size, number and shape of the
nucleus' lobes, granules, colour of the cytoplasm; neighbouring kinds overlap (a band neutrophil resembles a late
granulocyte, a large lymphocyte a small monocyte). **Not real patients**: good for tests, demos and comparing
methods, worthless as clinical evidence.

Lengths are fractions of half the image side, so an image keeps its content at any ``image_size``. Image i depends
only on (seed, split, i): a larger set extends a smaller one. Float64 throughout: the last bit of exp and cos differs
between processors, and in float32 that would change a few hundred pixels, and with them the dataset's digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedbicross.data.dataset import Dataset, Images, Indices, Split
from fedbicross.errors import ConfigError, DataError

Floats: TypeAlias = NDArray[np.float64]
Range: TypeAlias = tuple[float, float]
Colour: TypeAlias = tuple[float, float, float]

NOTE = "cells: synthetic images drawn by formula, not patients; use for tests and method comparison only"


@dataclass(frozen=True)
class Kind:
    """How one kind of cell is drawn; every pair is the range of a uniform draw."""

    share: float  # of BloodMNIST's images, per cent
    radius: Range  # of the cell
    nucleus: Range  # radius of the nucleus over that of the cell
    lobes: Range  # 1 = round ... 4 = segmented; fractions are drawn by chance
    spread: Range  # distance of the lobes from the cell's centre over the nucleus radius
    indent: Range  # depth of the notch (kidney shape) over the nucleus radius
    shift: Range  # how far off centre the nucleus lies over the free room
    wobble: Range  # irregularity of the outline
    granules: Range  # strength of the granules in the cytoplasm
    chromatin: Range  # strength of the texture of the nucleus
    vacuoles: Range  # strength of pale bubbles
    cytoplasm: Colour
    tint: Colour  # of the granules
    stain: Colour  # of the nucleus


# fmt: off
KINDS: dict[str, Kind] = {
    "basophil": Kind(7.1, (.42, .62), (.78, .95), (1, 3), (.15, .45), (0, .25), (0, .6), (.02, .08),
                     (.6, 1.2), (.5, 1.0), (0, .2), (158, 104, 162), (74, 44, 120), (84, 50, 132)),
    "eosinophil": Kind(18.2, (.50, .70), (.66, .86), (2, 3.6), (.50, .80), (0, .30), (.1, .7), (.01, .06),
                       (.3, .9), (.2, .6), (0, .15), (204, 132, 138), (190, 92, 96), (92, 54, 140)),
    "erythroblast": Kind(9.1, (.28, .52), (.52, .82), (1, 1.5), (.05, .25), (0, .12), (.1, 1.0), (.01, .07),
                         (0, .25), (.3, .9), (0, .1), (152, 140, 178), (120, 110, 160), (72, 44, 112)),
    "immature granulocyte": Kind(16.9, (.52, .82), (.64, .84), (1, 1.7), (.10, .40), (0, .60), (.2, 1.0), (.01, .09),
                                 (.2, .8), (.3, .8), (0, .2), (184, 142, 186), (142, 88, 156), (104, 60, 148)),
    "lymphocyte": Kind(7.1, (.36, .60), (.80, .97), (1, 1.4), (.05, .20), (0, .30), (0, .8), (.01, .10),
                       (0, .25), (.2, .7), (0, .15), (146, 140, 200), (120, 100, 180), (86, 50, 140)),
    "monocyte": Kind(8.3, (.54, .84), (.66, .88), (1, 2.2), (.15, .50), (.2, .85), (0, .8), (.03, .15),
                     (0, .3), (.3, .8), (.1, 1.0), (160, 148, 198), (130, 108, 176), (104, 66, 154)),
    "neutrophil": Kind(19.5, (.50, .72), (.58, .80), (1.6, 4.4), (.45, .85), (0, .50), (0, .7), (.01, .06),
                       (0, .45), (.2, .6), (0, .2), (212, 170, 188), (186, 128, 160), (92, 54, 140)),
    "platelet": Kind(13.7, (.14, .30), (.40, .80), (1, 3), (.10, .60), (0, .20), (0, .6), (.03, .14),
                     (.3, 1.0), (.4, 1.0), (0, .2), (176, 146, 190), (112, 72, 150), (126, 84, 162)),
}
# fmt: on
CLASSES = tuple(KINDS)
SPLITS = ("train", "test")
TRAIN_SIZE, TEST_SIZE = 4000, 1000

_NEIGHBOURS = 7  # red cells that may be drawn around the cell
_LOBES = 5  # lobes that may be drawn
_COARSE, _FINE = 6, 17  # knots of the two texture fields over the whole image
_CHUNK = 256  # images rendered at once: bounds memory and stays in cache
_RANGES = ("radius", "nucleus", "lobes", "spread", "indent", "shift", "wobble", "granules", "chromatin", "vacuoles")


def load_cells(
    image_size: int = 28, seed: int = 0, train_size: int = TRAIN_SIZE, test_size: int = TEST_SIZE
) -> Dataset:
    """Draw the ``cells`` dataset."""
    if not 8 <= image_size <= 512:
        raise ConfigError("bad_image_size", f"cells can be drawn at 8 to 512 pixels, not {image_size}")
    for what, size in (("train_size", train_size), ("test_size", test_size)):
        if not 1 <= size <= 1_000_000:
            raise DataError("bad_subset_size", f"{what} must be between 1 and 1,000,000, got {size}")
    train = Split(*draw(train_size, image_size, seed, "train"))
    test = Split(*draw(test_size, image_size, seed, "test"))
    return Dataset("cells", CLASSES, train, test, NOTE)


def draw(count: int, image_size: int, seed: int, split: str) -> tuple[Images, Indices]:
    """The first ``count`` images and labels of a split."""
    labels = draw_labels(count, seed, split)
    images = np.empty((count, image_size, image_size, 3), np.uint8)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        images[start:stop] = _render(labels[start:stop], _Draws.of(seed, split, start, stop, image_size), image_size)
    return images, labels


def draw_labels(count: int, seed: int, split: str) -> Indices:
    """Labels with BloodMNIST's shares: a golden-ratio sequence keeps every prefix within a sample or two of them."""
    offset = np.random.default_rng((seed, SPLITS.index(split), 0xCE11)).random()
    points = np.mod(offset + np.arange(count) * 0.6180339887498949, 1.0)
    shares = np.array([kind.share for kind in KINDS.values()])
    edges = np.cumsum(shares / shares.sum())[:-1]
    labels: Indices = np.searchsorted(edges, points, side="right").astype(np.int64)
    return labels


@dataclass
class _Draws:
    """The random numbers of a chunk of images, one stream an image."""

    uniform: Floats  # [n, 128], taken from the left by ``next``
    coarse: Floats  # [n, 6, 6]
    fine: Floats  # [n, 17, 17]
    noise: Floats  # [n, S, S, 3], drawn last: the cell is the same at every image size
    used: int = 0

    @classmethod
    def of(cls, seed: int, split: str, start: int, stop: int, size: int) -> _Draws:
        n = stop - start
        uniform = np.empty((n, 128))
        coarse, fine = np.empty((n, _COARSE, _COARSE)), np.empty((n, _FINE, _FINE))
        noise = np.empty((n, size, size, 3))
        for row, index in enumerate(range(start, stop)):
            rng = np.random.default_rng((seed, SPLITS.index(split), index))
            rng.random(out=uniform[row])
            for field in (coarse, fine, noise):
                rng.standard_normal(out=field[row])
        return cls(uniform, coarse, fine, noise)

    def next(self, count: int = 1, low: float = 0.0, high: float = 1.0) -> Floats:
        """Uniform numbers [n, count]."""
        self.used += count
        return low + (high - low) * self.uniform[:, self.used - count : self.used]


def _render(labels: Indices, draws: _Draws, size: int) -> Images:
    kinds = list(KINDS.values())
    # [n, 1, 1] per parameter, ready to broadcast against the pixel grid.
    value = {}
    for name in _RANGES:
        low, high = np.array([getattr(kind, name) for kind in kinds], np.float64)[labels].T
        value[name] = (low + (high - low) * draws.next()[:, 0])[:, None, None]
    axis = (np.arange(size) + 0.5) / size * 2 - 1
    soft = np.maximum(draws.next(1, 0.02, 0.09)[..., None], 1.2 / size)  # optics: width of every edge

    centre = draws.next(2, -0.12, 0.12)
    dx, dy = axis[None, None, :] - centre[:, 0, None, None], axis[None, :, None] - centre[:, 1, None, None]
    cell = _outline(dx, dy, value["radius"], value["wobble"], draws)
    nucleus, nucleus_core = _nucleus(dx, dy, value, soft, draws)
    coarse, fine = _field(draws.coarse, size), _field(draws.fine, size)

    image = _background(axis, value["radius"], centre, soft, draws)
    inside = _edge(cell, soft)
    nuclear = _edge(nucleus, soft) * inside
    cytoplasm = _jitter([kind.cytoplasm for kind in kinds], labels, draws)
    tint = _jitter([kind.tint for kind in kinds], labels, draws)
    stain = _jitter([kind.stain for kind in kinds], labels, draws)
    rim = 1 - 0.10 * _edge(-cell - 0.06, soft)  # a slightly darker membrane
    _paint(image, cytoplasm, inside * (0.93 + 0.05 * coarse) * rim)
    _paint(image, tint, inside * np.clip(value["granules"] * (fine - 0.35), 0, 0.85))
    bubbles = np.clip(value["vacuoles"] * (fine - 0.9), 0, 0.8) * (inside - nuclear)
    _paint(image, np.full((len(labels), 3), 232.0), bubbles)
    clumps = 0.88 + value["chromatin"] * (0.10 * fine + 0.05 * coarse) + 0.05 * nucleus_core
    _paint(image, stain, nuclear * np.clip(clumps, 0.35, 1))
    # Basophils' granules lie over the nucleus too.
    over = np.clip(value["granules"] - 0.55, 0, 1) * np.clip(fine - 0.5, 0, 1)
    _paint(image, tint * 0.8, nuclear * over)
    return _camera(image, draws)


def _outline(dx: Floats, dy: Floats, radius: Floats, wobble: Floats, draws: _Draws) -> Floats:
    """Signed distance (negative inside) to a circle bent by harmonics 2 to 5."""
    angle = np.arctan2(dy, dx)
    phase, height = draws.next(4, 0, 2 * np.pi), draws.next(4, -1, 1)
    bend = np.zeros_like(angle)
    for k in range(4):
        # 1/sqrt(k): low harmonics (ovals) dominate, as in smeared cells.
        bend += height[:, k, None, None] / np.sqrt(k + 1) * np.cos((k + 2) * angle + phase[:, k, None, None])
    return np.hypot(dx, dy) - radius * (1 + wobble * bend)


def _nucleus(dx: Floats, dy: Floats, value: dict[str, Floats], soft: Floats, draws: _Draws) -> tuple[Floats, Floats]:
    """Signed distance to a chain of lobes with a notch, and a field that is 1 in the middle of the lobes."""
    cell, radius = value["radius"], value["radius"] * value["nucleus"]
    count = np.floor(value["lobes"] + draws.next()[..., None])
    turn, bow = draws.next(1, 0, 2 * np.pi)[..., None], draws.next(1, 0.7, 1.25)[..., None]
    away = (cell - radius) * value["shift"]
    side = draws.next(1, 0, 2 * np.pi)[..., None]
    x, y = dx - away * np.cos(side), dy - away * np.sin(side)
    single = count < 1.5
    # Several lobes are smaller and lie along an arc.
    ring = np.where(single, 0.0, radius * value["spread"])
    lobe = np.where(single, radius, radius - ring * 0.68)
    step = (1.4 + 0.55 * count) / np.maximum(count - 1, 1)  # two lobes face each other, four make a horseshoe
    sharp = 8 / np.maximum(lobe, 0.05)
    total = np.zeros_like(dx * dy)
    jitter, scale = draws.next(_LOBES, -0.3, 0.3), draws.next(_LOBES, 0.82, 1.12)
    squeeze, tilt = draws.next(1, 0, 0.25)[..., None], draws.next(1, 0, np.pi)[..., None]
    cos, sin = np.cos(tilt), np.sin(tilt)
    for k in range(_LOBES):
        angle = turn + bow * step * k + jitter[:, k, None, None]
        u, v = x - ring * np.cos(angle), y - ring * np.sin(angle)
        along, across = (u * cos + v * sin) * (1 - squeeze), (-u * sin + v * cos) * (1 + squeeze)
        distance = np.hypot(along, across) - lobe * scale[:, k, None, None]
        # Smooth union: log-sum-exp joins neighbours by a bridge; clipped so that it cannot overflow.
        total += np.where(k < count, np.exp(np.clip(-sharp * distance, -40, 40)), 0)
    joined = -np.log(total + 1e-12) / sharp
    notch_angle = draws.next(1, 0, 2 * np.pi)[..., None]
    reach = radius * (1.45 - value["indent"])
    notch = radius * 0.55 - np.hypot(x - reach * np.cos(notch_angle), y - reach * np.sin(notch_angle))
    shape = np.maximum(joined, notch)
    return shape, _edge(shape + 0.5 * lobe, 3 * soft)


def _background(axis: Floats, radius: Floats, centre: Floats, soft: Floats, draws: _Draws) -> Floats:
    """Plasma with pale-centred red cells around the middle one."""
    n, size = len(centre), len(axis)
    # One slide in twenty comes from another laboratory: bluish instead of cream, as in the real collection.
    other = draws.next() < 0.05
    base = np.where(other, np.array([206.0, 204.0, 222.0]), np.array([250.0, 228.0, 204.0]))
    base = base + draws.next(3, -5, 5)
    image = np.empty((n, size, size, 3))
    image[:] = base[:, None, None, :]
    red = np.array([208.0, 166.0, 158.0]) + draws.next(3, -12, 12)
    place, bearing = draws.next(_NEIGHBOURS), draws.next(_NEIGHBOURS, 0, 2 * np.pi)
    big, flat, shown = draws.next(_NEIGHBOURS, 0.22, 0.31), draws.next(_NEIGHBOURS, 0.7, 1.0), draws.next(_NEIGHBOURS)
    pallor = draws.next(_NEIGHBOURS, 0.15, 0.8)
    for k in range(_NEIGHBOURS):
        far = radius[:, 0, 0] + big[:, k] * 0.9 + place[:, k] * 0.75
        x = axis[None, None, :] - (centre[:, 0] + far * np.cos(bearing[:, k]))[:, None, None]
        y = axis[None, :, None] - (centre[:, 1] + far * np.sin(bearing[:, k]))[:, None, None]
        distance = np.hypot(x * flat[:, k, None, None], y) - big[:, k, None, None]
        ring = _edge(distance, soft) * (1 - pallor[:, k, None, None] * _edge(distance + 0.13, soft))
        _paint(image, red, ring * (shown[:, k, None, None] < 0.6) * 0.85)
    return image


def _camera(image: Floats, draws: _Draws) -> Images:
    """Stain strength, colour cast, brightness, slight blur and sensor noise."""
    strength, gain = draws.next(1, 0.82, 1.18)[..., None, None], draws.next(3, 0.97, 1.03)[:, None, None, :]
    image = 255 * (np.maximum(image, 1) / 255) ** strength * gain
    weight = draws.next(1, 0, 0.25)[..., None, None]
    for dimension in (1, 2):
        pad = [(0, 0)] * 4
        pad[dimension] = (1, 1)
        padded = np.pad(image, pad, mode="edge")
        low = padded[:, :-2] if dimension == 1 else padded[:, :, :-2]
        high = padded[:, 2:] if dimension == 1 else padded[:, :, 2:]
        image = (1 - 2 * weight) * image + weight * (low + high)
    image += draws.noise * draws.next(1, 1.0, 6.0)[..., None, None]
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def _jitter(colours: list[Colour], labels: Indices, draws: _Draws) -> Floats:
    """The kind's colour, moved by a draw per image: together in lightness, apart in hue."""
    chosen: Floats = np.array(colours, np.float64)[labels]
    return np.clip(chosen + draws.next(1, -16, 16) + draws.next(3, -14, 14), 0, 255)


def _edge(distance: Floats, soft: Floats) -> Floats:
    """1 inside, 0 outside, smooth over ``soft``."""
    ramp = np.clip(0.5 - distance / (2 * soft), 0, 1)
    return ramp * ramp * (3 - 2 * ramp)


def _paint(image: Floats, colour: Floats, alpha: Floats) -> None:
    """Lay a colour [n, 3] over the images in place."""
    image += alpha[..., None] * (colour[:, None, None, :] - image)


def _field(knots: Floats, size: int) -> Floats:
    """Smooth noise [n, size, size] from knots [n, k, k] by linear interpolation along both axes."""
    count = knots.shape[1]
    position = (np.arange(size) + 0.5) / size * (count - 1)
    left = np.minimum(position.astype(np.int64), count - 2)
    weights = np.zeros((size, count))
    weights[np.arange(size), left] = 1 - (position - left)
    weights[np.arange(size), left + 1] = position - left
    field: Floats = weights @ knots @ weights.T
    return field
