"""Where images come from and who holds them: loaders, the embedded ``cells`` set, downloads, partitions."""

from __future__ import annotations

from fedbicross.data.catalogue import DATASETS, DatasetInfo
from fedbicross.data.dataset import Dataset, Split
from fedbicross.data.load import default_data_dir, load_dataset
from fedbicross.data.partition import (
    PARTITIONS,
    Partition,
    check_partition,
    client_images,
    make_partition,
    test_images,
)
from fedbicross.data.scanner import ScannerShift

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Dataset",
    "DatasetInfo",
    "Partition",
    "ScannerShift",
    "Split",
    "check_partition",
    "client_images",
    "default_data_dir",
    "load_dataset",
    "make_partition",
    "test_images",
]
