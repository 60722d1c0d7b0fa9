"""Pictures for the documentation, drawn as plain SVG text so that the same code gives the same bytes everywhere."""

from __future__ import annotations

from html import escape

KINDS = ("iid", "dirichlet", "dirichlet_plain", "pathological", "quantity")
COLOURS = ("#1b4965", "#5fa8d3", "#bee9e8", "#8a5a83", "#d68c45", "#e9c46a", "#4d908e", "#9aa0a6")
CLIENTS, IMAGES, ALPHA = 5, 2000, 0.3
WIDTH, BAR, GAP, LEFT, TITLE = 720, 16, 5, 90, 26


def all_pictures() -> dict[str, str]:
    """Every generated picture by file name."""
    return {"partitions.svg": partitions()}


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
    style = "<style>text{font:12px sans-serif;fill:#222}.t{font-weight:bold;font-size:13px}</style>"
    title = f"<title>{IMAGES} training images dealt to {CLIENTS} clients</title>"
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img">\n{title}\n{style}\n{background}\n{body}\n</svg>\n'
    )
