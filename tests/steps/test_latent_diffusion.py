"""The diffusers prior on a model of Stable Diffusion's layout that is tiny and knows nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedbicross import models
from fedbicross.engine.ensemble import Ensemble
from fedbicross.errors import DataError
from fedbicross.steps.diffusion_prior import Guidance, guided_images, load_prior
from small import refuses

pytestmark = pytest.mark.slow  # to import diffusers alone takes seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """priors/stable_diffusion with random weights."""
    diffusers = pytest.importorskip("diffusers", reason="needs the extra `diffusion`")
    transformers = pytest.importorskip("transformers", reason="needs the extra `diffusion`")
    root = tmp_path_factory.mktemp("priors")
    path = root / "stable_diffusion"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=16,
            attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
        vae = diffusers.AutoencoderKL(
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        )
        vocabulary = ["<|startoftext|>", "<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz0123456789-"]
        vocabulary += [f"{letter}</w>" for letter in vocabulary[2:]]
        text = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                vocab_size=len(vocabulary),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=12,
                bos_token_id=0,
                eos_token_id=1,
            )
        )
    unet.save_pretrained(path / "unet")
    vae.save_pretrained(path / "vae")
    text.save_pretrained(path / "text_encoder")
    diffusers.DDIMScheduler(beta_schedule="scaled_linear").save_pretrained(path / "scheduler")
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(vocabulary)}))
    (path / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (path / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({**special, "pad_token": "<|endoftext|>", "model_max_length": 12})
    )
    (path / "model_index.json").write_text("{}")
    return root


def test_guided_images_through_a_latent_diffusion_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBICROSS_PRIORS", str(folder))
    before = torch.random.get_rng_state()
    prior = load_prior("stable_diffusion", 3, 12, 3.0, "cpu")
    assert torch.equal(torch.random.get_rng_state(), before)
    network = models.build("resnet8", 3, 2, 12)
    models.initialise(network, torch.Generator().manual_seed(0))
    texts = ["an image of cat", "an image of dog"]
    images = [
        guided_images(
            prior,
            Ensemble([network]),
            torch.tensor([0, 1]),
            texts,
            (3, 12, 12),
            Guidance(scale, 0.1, 1),
            torch.Generator().manual_seed(0),
        )
        for scale in (0.0, 1.0, 1.0)
    ]
    assert images[0].shape == (2, 3, 12, 12)
    assert not torch.equal(images[0], images[1])  # the client's gradient reaches the latents through decoder and U-Net
    assert torch.equal(images[1], images[2])
    assert prior.flops > 1e6


def test_the_guess_uses_text_and_its_weight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBICROSS_PRIORS", str(folder))
    guesses = {}
    for cfg in (0.0, 1.0, 3.0):
        prior = load_prior("stable_diffusion", 4, 12, cfg, "cpu")
        latents = prior.noise(1, torch.Generator().manual_seed(0))
        with torch.no_grad():
            guesses[cfg] = prior.clean(latents, 0, ["a"])
    # Linear in the weight of the text: x(3) = x(0) + 3 (x(1) - x(0)).
    expected = guesses[0.0] + 3 * (guesses[1.0] - guesses[0.0])
    assert torch.allclose(guesses[3.0], expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(guesses[0.0], guesses[1.0])
    assert prior.levels == sorted(prior.levels)
    assert prior.levels[-1] == 1.0


def test_a_damaged_folder_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stable_diffusion").mkdir()
    (tmp_path / "stable_diffusion" / "model_index.json").write_text("{}")
    monkeypatch.setenv("FEDBICROSS_PRIORS", str(tmp_path))
    with refuses(DataError, "prior_weights") as error:
        load_prior("stable_diffusion", 3, 12, 3.0, "cpu")
    assert str(tmp_path) not in error.value.args[0].partition("(")[0]
