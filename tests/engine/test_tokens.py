"""Hierarchical scale encoding: which windows, in which order, and a cache that can be trusted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbicross.context import MemoryStore
from fedbicross.engine.tokens import Box, boxes, image_hashes, token_sequences
from fedbicross.errors import ConfigError
from fedbicross.models.encoders import EncoderSpec, load_encoder
from fedbicross.models.encoders.base import Encoder

SPEC = EncoderSpec("tiny", 28, 14, 14)


def pictures(count: int, size: int = 28, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


@pytest.mark.parametrize(("size", "window"), [(448, 224), (28, 14)])
def test_the_papers_windows(size: int, window: int) -> None:
    half = size // 2
    expected = [Box(0, 0, size), Box(0, 0, half), Box(0, half, half), Box(half, 0, half), Box(half, half, half)]
    assert boxes(size, window, window) == expected


@pytest.mark.parametrize(("size", "window", "stride"), [(28, 14, 7), (30, 14, 14), (31, 10, 8), (9, 8, 8), (5, 1, 1)])
def test_windows_go_row_by_row_and_cover_every_pixel(size: int, window: int, stride: int) -> None:
    views = boxes(size, window, stride)
    assert views[0] == Box(0, 0, size)
    corners = [(box.top, box.left) for box in views[1:]]
    assert corners == sorted(set(corners))
    covered = np.zeros((size, size), bool)
    for box in views[1:]:
        assert box.side == window and box.top + window <= size and box.left + window <= size
        covered[box.top : box.top + window, box.left : box.left + window] = True
    assert covered.all()


def test_without_a_window_the_whole_image_only() -> None:
    assert boxes(28, None) == [Box(0, 0, 28)]
    assert boxes(28, 14) == boxes(28, 14, 14)


@pytest.mark.parametrize(("window", "stride"), [(28, 28), (40, 5), (14, 15), (14, 0), (0, 1)])
def test_windows_that_do_not_fit(window: int, stride: int) -> None:
    with pytest.raises(ConfigError, match="does not fit images of 28 px"):
        boxes(28, window, stride)


def test_each_token_is_the_encoding_of_its_view() -> None:
    images, encoder = pictures(3), load_encoder("tiny")
    tokens = token_sequences(images, SPEC)
    assert tokens.shape == (3, 5, 128)
    assert torch.equal(tokens[:, 0], encoder(images))
    assert torch.equal(tokens[:, 2], encoder(np.ascontiguousarray(images[:, :14, 14:])))
    assert torch.equal(tokens[:, 3], encoder(np.ascontiguousarray(images[:, 14:, :14])))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call of the encoder got."""
    counts: list[int] = []
    plain = Encoder.__call__

    def counted(self: Encoder, images: np.ndarray) -> torch.Tensor:
        counts.append(len(images))
        return plain(self, images)

    monkeypatch.setattr(Encoder, "__call__", counted)
    return counts


def test_every_image_is_encoded_once_whatever_array_it_is_in(seen: list[int]) -> None:
    store, images = MemoryStore(), pictures(8)
    plain = token_sequences(images, SPEC)
    seen.clear()
    assert torch.equal(token_sequences(images[:5], SPEC, store=store), plain[:5])
    assert seen == [5] * 5
    seen.clear()
    mixed = images[[7, 1, 6, 1, 7, 0]]  # old and new ones, some twice
    assert torch.equal(token_sequences(mixed, SPEC, store=store), plain[[7, 1, 6, 1, 7, 0]])
    assert seen == [2] * 5
    seen.clear()
    assert torch.equal(token_sequences(images[[0, 6]], SPEC, store=store), plain[[0, 6]])
    assert torch.equal(token_sequences(images[:5], EncoderSpec(SPEC.name, SPEC.size), store=store), plain[:5, :1])
    assert seen == [], "the whole image is one of the views"
    assert token_sequences(images[:0], SPEC, store=store).shape == (0, 5, 128)


def test_the_cache_keeps_encoders_sizes_and_views_apart(seen: list[int]) -> None:
    store, images = MemoryStore(), pictures(2)
    first = token_sequences(images, EncoderSpec("tiny", 28), store=store)
    second = token_sequences(images, EncoderSpec("tiny", 20), store=store)
    assert seen == [2, 2] and not torch.equal(first, second)
    shifted = token_sequences(images, EncoderSpec("tiny", 28, 12, 8), store=store)
    assert torch.equal(shifted, token_sequences(images, EncoderSpec("tiny", 28, 12, 8)))


def test_a_kill_between_shard_and_index_costs_only_the_shard() -> None:
    class Mortal(MemoryStore):
        alive = 1

        def save(self, name: str, data: bytes) -> None:
            if not self.alive:
                raise KeyboardInterrupt
            self.alive -= 1
            super().save(name, data)

    store, images = Mortal(), pictures(3)
    with pytest.raises(KeyboardInterrupt):
        token_sequences(images, SPEC, store=store)
    store.alive = 100
    assert torch.equal(token_sequences(images, SPEC, store=store), token_sequences(images, SPEC))


def test_hashes_tell_images_and_shapes_apart() -> None:
    images = pictures(3)
    assert len({row.tobytes() for row in image_hashes(np.concatenate([images, images]))}) == 3
    flat = np.zeros((1, 4, 4, 3), np.uint8)
    assert image_hashes(flat).tobytes() != image_hashes(np.zeros((1, 8, 2, 3), np.uint8)).tobytes()
