"""What an upload says of its privacy: (ε, δ), and the noisy releases behind it. Free of torch and scipy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedbicross.settings import Settings

MOST_RELEASES = 100  # in one statement


class Release(Settings):
    """One use of the images behind noise. The noise multiplier is σ over the L2 sensitivity."""

    what: str = Field(max_length=200, description="what was released, in words")
    mechanism: Literal["gaussian", "sampled_gaussian"]
    noise_multiplier: float = Field(gt=0, le=1e9)
    sample_rate: float = Field(1.0, gt=0, le=1, description="chance of each image to be in a step (sampled_gaussian)")
    steps: int = Field(1, ge=1, le=10**9)


class Statement(Settings):
    """All releases of an upload together are (ε, δ)-private; neighbours differ by one image, or patient."""

    epsilon: float = Field(gt=0, le=1e6)
    delta: float = Field(gt=0, lt=1)
    unit: Literal["image", "patient"] = "image"
    releases: list[Release] = Field(min_length=1, max_length=MOST_RELEASES)

    @property
    def words(self) -> str:
        """For tables and cards."""
        names = {"gaussian": "Gaussian mechanism", "sampled_gaussian": "DP-SGD"}
        used = ", ".join(f"{names[part.mechanism]} on {part.what}" for part in self.releases)
        return f"ε = {self.epsilon:.4g}, δ = {self.delta:.4g} for each {self.unit} ({used})"
