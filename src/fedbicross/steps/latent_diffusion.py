"""Stable Diffusion (or any model of its layout) through ``diffusers``, from a folder; no network, no pickle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedbicross.errors import DataError
from fedbicross.steps.diffusion_prior import ddim_step


class LatentDiffusion:
    """The parts of a text-to-image pipeline, frozen; latents are the autoencoder's."""

    def __init__(self, folder: Path, steps: int, cfg: float, device: str = "cpu") -> None:
        parts = _load(folder)
        self.steps, self.cfg, self.device = steps, cfg, device
        # Half precision on a GPU, as the authors; on a CPU many half-precision kernels do not exist.
        dtype = torch.float16 if device == "cuda" else torch.float32
        self.unet = parts["unet"].to(device, dtype).eval().requires_grad_(False)
        self.vae = parts["vae"].to(device, dtype).eval().requires_grad_(False)
        self.text_encoder = parts["text_encoder"].to(device, dtype).eval().requires_grad_(False)
        self.tokenizer = parts["tokenizer"]
        scheduler = parts["scheduler"]
        if scheduler.config.get("prediction_type", "epsilon") != "epsilon":
            raise DataError(
                "prior_weights", f"{folder.name}: only models that predict the noise (epsilon) are supported"
            )
        scheduler.set_timesteps(steps)
        self.times = [int(t) for t in scheduler.timesteps]
        self.levels = [float(scheduler.alphas_cumprod[t]) for t in self.times] + [1.0]
        self._texts: dict[str, Tensor] = {}

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """White noise in the latent space."""
        side = self.unet.config.sample_size
        shape = (count, self.unet.config.in_channels, side, side)
        return torch.randn(shape, generator=generator, device=generator.device).to(self.device)

    def clean(self, latents: Tensor, step: int, texts: Sequence[str]) -> Tensor:
        """x₀ = (x_t − √(1−ᾱ) ε)/√ᾱ, with ε = ε(∅) + cfg·(ε(text) − ε(∅))."""
        level, dtype = self.levels[step], self.unet.dtype
        words = torch.cat([self._embed(""), *(self._embed(text) for text in texts)])
        words = torch.cat([words[:1].expand(len(texts), -1, -1), words[1:]])
        both = torch.cat([latents, latents]).to(dtype)
        without, given = self.unet(both, self.times[step], encoder_hidden_states=words).sample.float().chunk(2)
        noise = without + self.cfg * (given - without)
        guess: Tensor = (latents - (1 - level) ** 0.5 * noise) / level**0.5
        return guess

    def advance(self, latents: Tensor, clean: Tensor, step: int) -> Tensor:
        """DDIM."""
        return ddim_step(latents, clean, self.levels[step], self.levels[step + 1])

    def decode(self, latents: Tensor) -> Tensor:
        """The autoencoder's decoder."""
        images: Tensor = self.vae.decode((latents / self.vae.config.scaling_factor).to(self.vae.dtype)).sample
        return images.float()

    @torch.no_grad()
    def _embed(self, text: str) -> Tensor:
        if text not in self._texts:
            length = self.tokenizer.model_max_length
            ids = self.tokenizer(text, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
            self._texts[text] = self.text_encoder(ids.input_ids.to(self.device))[0]
        return self._texts[text]

    @cached_property
    def flops(self) -> int:
        """Operations of one guess (with and without text) and one decoding of one image, counted."""
        latents = self.noise(1, torch.Generator())
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.decode(self.clean(latents, 0, [""]))
        return int(counter.get_total_flops())


def _load(folder: Path) -> dict[str, Any]:
    offline = {"local_files_only": True}
    weights = {**offline, "use_safetensors": True}  # a .bin file is a pickle: never
    try:
        with torch.random.fork_rng(devices=[]):  # loading fills weights with random numbers first
            return {
                "unet": diffusers.UNet2DConditionModel.from_pretrained(folder, subfolder="unet", **weights),
                "vae": diffusers.AutoencoderKL.from_pretrained(folder, subfolder="vae", **weights),
                "text_encoder": transformers.CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", **weights),
                "tokenizer": transformers.CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer", **offline),
                "scheduler": diffusers.DDIMScheduler.from_pretrained(folder, subfolder="scheduler", **offline),
            }
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise DataError("prior_weights", f"the diffusion model in {folder.name} cannot be read ({reason})") from None
