"""Examples of every class as one picture, with the names of the classes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from PIL import Image as pillow
from PIL import ImageDraw, ImageFont

from fedbicross.data.dataset import Images
from fedbicross.errors import printable

CELL, GAP, NAMES = 96, 4, 200  # pixels: an image, between images, the column of names
MOST_SIGNS = 28  # of a name


def example_grid(examples: Mapping[str, Sequence[Images]]) -> bytes:
    """A PNG with one row a class: its name, then its images."""
    columns = max((len(images) for images in examples.values()), default=0)
    sheet = pillow.new("RGB", (NAMES + columns * (CELL + GAP) + GAP, len(examples) * (CELL + GAP) + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for row, (name, images) in enumerate(examples.items()):
        top = GAP + row * (CELL + GAP)
        shown = printable(name)
        shown = shown if len(shown) <= MOST_SIGNS else f"{shown[: MOST_SIGNS - 3]}..."
        draw.text((GAP * 2, top + CELL // 2), shown, fill="black", font=font, anchor="lm")
        for column, pixels in enumerate(images):
            image = pillow.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).convert("RGB")
            sheet.paste(image.resize((CELL, CELL)), (NAMES + column * (CELL + GAP), top))
    stream = io.BytesIO()
    sheet.save(stream, "PNG")
    return stream.getvalue()
