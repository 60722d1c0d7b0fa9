"""How hard an audit tries. Torch-free, so that mistakes in a policy are named at once."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from fedbicross.settings import Settings, parse


class Effort(Settings):
    """How hard the audit tries: an attacker with more time may do better."""

    shadows: int = Field(8, ge=4, le=256, description="networks trained to learn what a member looks like; even")
    images: int | None = Field(2000, ge=20, description="of each kind, trained on and held out, at most; none: all")
    epochs: int | None = Field(None, ge=1, description="of a shadow's training, at most; none: as the recipe says")
    canaries: int = Field(200, ge=20, description="images with wrong labels for the lower bound on ε, at most")
    delta: float = Field(1e-5, ge=0, lt=1, description="δ for which that bound holds")
    inverted: int = Field(64, ge=2, description="images inverted from the network")
    steps: int = Field(500, ge=1, description="of the inversion")

    @model_validator(mode="after")
    def _pairs(self) -> Effort:
        if self.shadows % 2:
            raise ValueError("shadows must be an even number: they are trained in pairs")
        return self


QUICK: dict[str, Any] = {"shadows": 4, "images": 200, "epochs": 20, "canaries": 100, "inverted": 32, "steps": 60}


def effort(quick: bool = False, **given: Any) -> Effort:
    """The settings, from those that were named; ``quick`` takes minutes on two cores."""
    named = {key: value for key, value in given.items() if value is not None}
    return parse(Effort, {**(QUICK if quick else {}), **named}, "audit")
