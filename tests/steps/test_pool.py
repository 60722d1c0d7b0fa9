"""The replay pool: what goes in comes out, the oldest leave first, and nothing touches a disk."""

from __future__ import annotations

import pytest
import torch

from fedbicross.bundle import pack, unpack
from fedbicross.steps.pool import Pool, decode, encode


def batch(number: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.rand(size, 1, 3, 3, generator=torch.Generator().manual_seed(number)) * 2 - 1
    return images, torch.full((size,), number)


@pytest.mark.parametrize(("storage", "error"), [("uint8", 1 / 255), ("bf16", 1 / 256), ("fp32", 0.0)])
def test_storage_is_as_exact_as_it_says(storage, error):
    images, _ = batch(0)
    kept = encode(images, storage)
    assert kept.element_size() == {"uint8": 1, "bf16": 2, "fp32": 4}[storage]
    assert decode(kept).dtype == torch.float32
    assert (decode(kept) - images).abs().max() <= error
    assert torch.equal(encode(decode(kept), storage), kept), "kept twice is kept once"


def test_uint8_is_what_the_clients_were_fed():
    values = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(decode(values), values.float() / 127.5 - 1)
    assert encode(torch.tensor([-9.0, -1.0, 1.0, 9.0]), "uint8").tolist() == [0, 0, 255, 255]


def test_the_oldest_batch_leaves_first():
    pool = Pool(3, "fp32")
    for number in range(5):
        pool.add(*batch(number))
        assert len(pool) == min(number + 1, 3) and pool.images == 4 * len(pool)
        taken = pool.take(torch.arange(pool.images))  # between adding, so that joined memory is renewed
        oldest = max(0, number - 2)
        assert taken["labels"].tolist() == [n for n in range(oldest, number + 1) for _ in range(4)]
    assert torch.equal(pool.batch(-1)["images"], batch(4)[0])
    assert torch.equal(pool.batch(0)["images"], batch(2)[0])


def test_one_batch_only():
    pool = Pool(1)
    pool.add(*batch(0))
    pool.add(*batch(1))
    assert len(pool) == 1 and pool.take(torch.arange(4))["labels"].tolist() == [1] * 4


def test_rows_come_with_their_labels_and_extras():
    pool = Pool(5, "fp32")
    for number in range(3):
        images, labels = batch(number)
        pool.add(images, labels, soft=images.flatten(1)[:, :2])
    rows = torch.tensor([11, 0, 5, 5])
    taken = pool.take(rows)
    everything = torch.cat([batch(n)[0] for n in range(3)])
    assert torch.equal(taken["images"], everything[rows])
    assert torch.equal(taken["soft"], everything[rows].flatten(1)[:, :2])
    assert taken["labels"].tolist() == [2, 0, 1, 1]


def test_images_are_held_once():
    pool = Pool(5)
    for number in range(3):
        pool.add(*batch(number))
    pool.take(torch.arange(2))
    storages = {kept["images"].untyped_storage().data_ptr() for kept in pool.batches}
    assert len(storages) == 1, "views of the joined tensor"


@pytest.mark.parametrize("joined", [False, True])
def test_a_checkpoint_brings_everything_back(joined):
    pool = Pool(2, "bf16")
    for number in range(3):
        images, labels = batch(number)
        pool.add(images, labels, logits=images.flatten(1))
    if joined:
        pool.take(torch.arange(1))
    tensors, _ = unpack(pack("stage", pool.tensors(), {}), "stage")
    again = Pool(2, "bf16")
    again.load(tensors)
    rows = torch.arange(8)
    for name, value in pool.take(rows).items():
        assert torch.equal(again.take(rows)[name], value)
    again.add(*batch(9), logits=torch.zeros(4, 9))
    assert again.take(rows)["labels"].tolist() == [2] * 4 + [9] * 4


def test_a_pool_for_nothing_is_refused():
    with pytest.raises(ValueError, match="0 batches"):
        Pool(0)
