"""Your own images from a CSV manifest with patients and sites: every site becomes a client.

Makes a few PNG files in a temporary folder first, so that it runs as it is. ``IMAGES=20 python own_images.py`` takes
twenty images a site.
"""

# %%
import csv
import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import fedbicross

per_site = int(os.environ.get("IMAGES", "60"))
rng = np.random.default_rng(0)
temporary = tempfile.TemporaryDirectory()  # gone at the end of the program
folder = Path(temporary.name)


def draw(label: str, site: str) -> Image.Image:
    """A grey square with a bright spot: large when malignant. North's scanner is darker."""
    y, x = np.mgrid[-1:1:32j, -1:1:32j]
    size = 0.5 if label == "malignant" else 0.25
    light = (60 if site == "north" else 90) + 120 * np.exp(-(x**2 + y**2) / size**2) + rng.normal(0, 15, (32, 32))
    return Image.fromarray(light.clip(0, 255).astype(np.uint8))


# %% [markdown]
# Two images of the same patient never part: not over train and test, and not over clients.

# %%
with (folder / "images.csv").open("w", newline="") as stream:
    writer = csv.writer(stream)
    writer.writerow(["path", "label", "patient_id", "site"])
    for site, share in (("north", 0.8), ("south", 0.5), ("west", 0.2)):
        for number in range(per_site):
            label = "malignant" if number < share * per_site else "benign"
            draw(label, site).save(folder / f"{site}-{number}.png")
            writer.writerow([f"{site}-{number}.png", label, f"{site}-patient-{number // 2}", site])

# %%
results = fedbicross.run(
    folder / "images.csv",
    out=folder / "run",
    partition={"kind": "natural"},
    clients=3,  # as many as there are sites
    methods=["fedavg"],
    model="resnet8",
    training={"recipe": "modern", "epochs": 12, "batch_size": 16},
)
for client in results["clients"]["0"]:
    print(client["client"], dict(zip(results["dataset"]["classes"], client["class_counts"], strict=True)))
print(results)
print("report written:", results.report().exists())
