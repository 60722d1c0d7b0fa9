"""The datasets known by name. Facts only; nothing here reads a file.

Checksums, class names and licences of MedMNIST are those published in its own package, version 3.0.2
(Zenodo record 10519652); the files of that record are called ``NAME.npz`` (28 pixels) and ``NAME_64.npz`` ….
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedbicross.errors import ConfigError, DataError, nearest

_CC_BY = "CC BY 4.0"
MEDMNIST_URL = "https://zenodo.org/records/10519652/files/{file}?download=1"


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a dataset before any file is read."""

    name: str
    classes: tuple[str, ...]
    channels: int
    task: str
    licence: str
    md5: Mapping[int, str] = field(default_factory=dict)  # by image size; empty where nothing is downloaded
    note: str = ""
    refused: str = ""  # why it cannot be used, where it cannot

    @property
    def sizes(self) -> tuple[int, ...]:
        """Image sizes that can be downloaded; empty for a dataset that is drawn at any size."""
        return tuple(self.md5)

    def file_name(self, size: int) -> str:
        """MedMNIST's name for the file of one image size."""
        return f"{self.name}.npz" if size == 28 else f"{self.name}_{size}.npz"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


def _medmnist(
    name: str, classes: tuple[str, ...], channels: int, md5: str, licence: str = _CC_BY, note: str = ""
) -> DatasetInfo:
    """A set of MedMNIST; ``md5`` of its files of 28, 64, 128 and 224 pixels."""
    sums = dict(zip((28, 64, 128, 224), md5.split(), strict=True))
    return DatasetInfo(name, classes, channels, "binary" if len(classes) == 2 else "multi-class", licence, sums, note)


_CELLS = _names("basophil, eosinophil, erythroblast, immature granulocyte, lymphocyte, monocyte, neutrophil, platelet")
_ORGANS = _names(
    "bladder, femur-left, femur-right, heart, kidney-left, kidney-right, liver, lung-left, lung-right, pancreas, spleen"
)
_KNOWN = (
    DatasetInfo("cells", _CELLS, 3, "multi-class", "Apache-2.0", note="synthetic, drawn by formula"),
    _medmnist(
        "bloodmnist",
        _CELLS,
        3,
        "7053d0359d879ad8a5505303e11de1dc 2b94928a2ae4916078ca51e05b6b800b "
        "adace1e0ed228fccda1f39692059dd4c b718ff6835fcbdb22ba9eacccd7b2601",
    ),
    _medmnist(
        "breastmnist",
        _names("malignant, normal or benign"),
        1,
        "750601b1f35ba3300ea97c75c52ff8f6 742edef2a1fd1524b2efff4bd7ba9364 "
        "363e4b3f8d712e9b5de15470a2aaadf1 b56378a6eefa9fed602bb16d192d4c8b",
    ),
    DatasetInfo(
        "chestmnist",
        (),
        1,
        "multi-label",
        _CC_BY,
        refused="it is multi-label (14 findings an image) and every method here needs one label an image",
    ),
    _medmnist(
        "dermamnist",
        _names(
            "actinic keratoses and intraepithelial carcinoma, basal cell carcinoma, benign keratosis-like "
            "lesions, dermatofibroma, melanoma, melanocytic nevi, vascular lesions"
        ),
        3,
        "0744692d530f8e62ec473284d019b0c7 b70a2f5635c6199aeaa28c31d7202e1f "
        "2defd784463fa5243564e855ed717de1 8974907d8e169bef5f5b96bc506ae45d",
        licence="CC BY-NC 4.0",
        note="the official split shares lesions between train and test",
    ),
    _medmnist(
        "octmnist",
        _names("choroidal neovascularization, diabetic macular edema, drusen, normal"),
        1,
        "c68d92d5b585d8d81f7112f81e2d0842 e229e9440236b774d9f0dfef9d07bdaf "
        "0a97e76651ace45c5d943ee3f65b63ae abc493b6d529d5de7569faaef2773ba3",
    ),
    _medmnist(
        "organamnist",
        _ORGANS,
        1,
        "68e3f8846a6bd62f0c9bf841c0d9eacc 2dcccc29b88e6da5a01161ef20cda288 "
        "eeae80d0a227a8d099027e1b3cfd3b60 50747347e05c87dd3aaf92c49f9f3170",
    ),
    _medmnist(
        "organcmnist",
        _ORGANS,
        1,
        "b9ceb9546e10131b32923c5bbeaea2b1 3ce34a8724ea6f548e6db4744d03b6a9 "
        "773c1f009daa3fe5d9a2a201b2a7ed94 050f5e875dc056f6768abf94ec9995d1",
    ),
    _medmnist(
        "organsmnist",
        _ORGANS,
        1,
        "9ab87b696fb54e2a387ebe992d6ed5f1 53a6d115339d874c25e309a994ff46d3 "
        "ded0c5fa01a95dc4978b956f613e9b8e b354719e553fbbb2513d5533f52a4cb1",
    ),
    _medmnist(
        "pathmnist",
        _names(
            "adipose, background, debris, lymphocytes, mucus, smooth muscle, normal colon mucosa, "
            "cancer-associated stroma, colorectal adenocarcinoma epithelium"
        ),
        3,
        "a8b06965200029087d5bd730944a56c1 55aa9c1e0525abe5a6b9d8343a507616 "
        "ac42d08fb904d92c244187169d1fd1d9 2c51a510bcdc9cf8ddb2af93af1eadec",
        note="the test images come from another centre than the training images",
    ),
    _medmnist(
        "pneumoniamnist",
        _names("normal, pneumonia"),
        1,
        "28209eda62fecd6e6a2d98b1501bb15f 8f4eceb4ccffa70c672198ea285246c6 "
        "05b46931834c231683c68f40c47b2971 d6a3c71de1b945ea11211b03746c1fe1",
    ),
    _medmnist(
        "retinamnist",
        _names("grade 0, grade 1, grade 2, grade 3, grade 4"),
        3,
        "bd4c0672f1bba3e3a89f0e4e876791e4 afda852cc34dcda56f86ad2b2457dbcc "
        "e48e916a24454daf90583d4e6efb1a18 eae7e3b6f3fcbda4ae613ebdcbe35348",
        note="the grades are ordered; here they are treated as plain classes",
    ),
    _medmnist(
        "tissuemnist",
        _names(
            "collecting duct or connecting tubule, distal convoluted tubule, glomerular endothelial cells, "
            "interstitial endothelial cells, leukocytes, podocytes, proximal tubule segments, thick "
            "ascending limb"
        ),
        1,
        "ebe78ee8b05294063de985d821c1c34b 123ece2eba09d0aa5d698fda57103344 "
        "61b955355d7425a89687b06cca3ce0c2 b077128c4a949f0a4eb01517f9037b9c",
    ),
)
DATASETS: dict[str, DatasetInfo] = {info.name: info for info in _KNOWN}


def medmnist_info(name: str, size: int | None = None) -> DatasetInfo:
    """Look up a downloadable dataset, refusing unknown names, unusable sets and sizes that were never published."""
    info = DATASETS.get(name)
    if info is None or name == "cells":
        known = [key for key in DATASETS if key != "cells"]
        raise ConfigError("unknown_dataset", f"no downloadable dataset is called {name!r}{nearest(name, known)}")
    if info.refused:
        raise DataError("multi_label", f"{name} cannot be used: {info.refused}")
    if size is not None and size not in info.sizes:
        raise ConfigError("bad_image_size", f"{name} exists at {', '.join(map(str, info.sizes))} pixels, not {size}")
    return info
