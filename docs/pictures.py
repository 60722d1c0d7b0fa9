"""Pictures for the documentation, drawn as plain SVG text so that the same code gives the same bytes everywhere."""

from __future__ import annotations

from html import escape

KINDS = ("iid", "dirichlet", "dirichlet_plain", "pathological", "quantity")
COLOURS = ("#1b4965", "#5fa8d3", "#bee9e8", "#8a5a83", "#d68c45", "#e9c46a", "#4d908e", "#9aa0a6")
CLIENTS, IMAGES, ALPHA = 5, 2000, 0.3
WIDTH, BAR, GAP, LEFT, TITLE = 720, 16, 5, 90, 26


def all_pictures() -> dict[str, str]:
    """Every generated picture by file name."""
    return {"partitions.svg": partitions(), "growth.svg": growth()}


def growth() -> str:
    """Milliseconds of a step over N and over K on logarithmic axes, from the stored benchmark of a GPU."""
    import json
    from math import log10
    from pathlib import Path

    file = Path(__file__).parents[1] / "results" / "benchmarks" / "gpu.json"
    found = json.loads(file.read_text(encoding="utf-8"))["growth"]
    titles = {"N": "clients N: synthesis step", "K": "clusters K: stage 2 step", "B": "batch B: synthesis step"}
    titles["pixels"] = "pixels a side, B = 96: synthesis step"
    parts, side, left = [], 250, 46
    panels = [name for name in titles if name in found]
    for number, name in enumerate(panels):
        points = [(point["x"], point["ms"]) for point in found[name]["points"]]
        low, high = log10(points[0][0]), log10(points[-1][0])
        x0, y0 = left + (number % 2) * (side + 110), 40 + (number // 2) * (side + 60)
        place = [
            (x0 + side * (log10(x) - low) / (high - low), y0 + side - side * log10(max(ms, 1)) / 3) for x, ms in points
        ]
        title = f"{titles[name]}, exponent {found[name]['exponent']:.2f}"
        parts.append(f'<text x="{x0}" y="{y0 - 14}" class="t">{escape(title)}</text>')
        for power in range(4):
            y = y0 + side - side * power / 3
            parts.append(f'<line x1="{x0}" x2="{x0 + side}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{x0 - 8}" y="{y + 4:.1f}" text-anchor="end">{10**power}</text>')
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in place)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[0]}" stroke-width="2"/>')
        for (x, y), (value, ms) in zip(place, points, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[0]}"/>')
            parts.append(f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{ms:.1f} ms</text>')
            parts.append(f'<text x="{x:.1f}" y="{y0 + side + 18}" text-anchor="middle">{value}</text>')
    height = 40 + ((len(panels) + 1) // 2) * (side + 60)
    return _svg(parts, height, "milliseconds of a step on one GPU, both axes logarithmic")


def partitions() -> str:
    """One panel a kind of partition: a bar a client, a colour a class, its length the number of images."""
    import numpy as np

    from fedbicross import seeds
    from fedbicross.data import Dataset, make_partition
    from fedbicross.data.cells import CLASSES, draw_labels

    labels, test = draw_labels(IMAGES, 0, "train"), draw_labels(len(CLASSES), 0, "test")
    blank = [np.zeros((len(part), 8, 8, 1), np.uint8) for part in (labels, test)]
    dataset = Dataset.from_arrays("cells", blank[0], labels, blank[1], test, classes=CLASSES)
    drawn = {
        kind: make_partition(dataset, kind, CLIENTS, seeds.numpy_rng(0, "partition"), alpha=ALPHA) for kind in KINDS
    }
    longest = max(len(rows) for partition in drawn.values() for rows in partition.train_indices)
    scale = (WIDTH - LEFT - 60) / longest
    parts, y = [], 8
    for kind, partition in drawn.items():
        parts.append(f'<text x="0" y="{y + 14}" class="t">{escape(kind)}</text>')
        y += TITLE
        for client, rows in zip(partition.clients, partition.train_indices, strict=True):
            parts.append(f'<text x="0" y="{y + 12}">{escape(client)}</text>')
            x = float(LEFT)
            for label, count in enumerate(np.bincount(labels[rows], minlength=len(CLASSES))):
                width = count * scale
                if count:
                    parts.append(
                        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[label]}">'
                        f"<title>{escape(CLASSES[label])}: {count}</title></rect>"
                    )
                x += width
            parts.append(f'<text x="{x + 6:.1f}" y="{y + 12}">{len(rows)}</text>')
            y += BAR + GAP
        y += 8
    for label, name in enumerate(CLASSES):
        x, row = (label % 4) * 180, y + (label // 4) * 20
        parts.append(f'<rect x="{x}" y="{row}" width="12" height="12" fill="{COLOURS[label]}"/>')
        parts.append(f'<text x="{x + 18}" y="{row + 11}">{escape(name)}</text>')
    height = y + 44
    return _svg(parts, height, f"{IMAGES} training images dealt to {CLIENTS} clients")


def _svg(parts: list[str], height: int, title: str) -> str:
    style = "<style>text{font:12px sans-serif;fill:#222}.t{font-weight:bold;font-size:13px}</style>"
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img">\n<title>{escape(title)}</title>\n{style}\n{background}\n{body}\n</svg>\n'
    )
