"""The site's own rules on what may leave it, in ``policy.toml``: they bind nobody else, and only the site changes them.

An agreement between sites may allow more than one of them wants to give. Whatever the carrier, an upload passes through
here before it is kept anywhere; what is refused is not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedbicross.disclosure.effort import Effort, effort
from fedbicross.errors import ConfigError, PolicyError, nearest
from fedbicross.messages import Upload
from fedbicross.methods import find
from fedbicross.methods.base import RECEIVES, Method, Receives
from fedbicross.settings import Settings, parse, read_toml

FILE = Path("policy.toml")  # taken where it lies in the folder that a command is given in


class AuditRule(Settings):
    """Whether an upload is audited before it leaves, and what it may show."""

    required: bool = Field(True, description="audit every upload before it leaves; false: only the rules above")
    quick: bool = Field(False, description="with settings that take minutes on two cores")
    max_auc: float | None = Field(
        None, ge=0.5, le=1, description="AUC of membership inference that the evidence has to rule out (its upper end)"
    )
    max_advantage: float | None = Field(None, ge=0, le=1, description="highest membership advantage")
    max_memorised: float | None = Field(
        None, ge=0, le=1, description="highest share of the examined training images that are known by heart"
    )
    effort: dict[str, Any] = Field(default_factory=dict, description="settings of the audit, by name")

    @property
    def trying(self) -> Effort:
        """The audit's settings."""
        return effort(self.quick, **self.effort)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set."""
        named = {"max_auc": self.max_auc, "max_advantage": self.max_advantage, "max_memorised": self.max_memorised}
        return {name: value for name, value in named.items() if value is not None}


class Policy(Settings):
    """``policy.toml``: what is not said is allowed."""

    methods: list[str] | None = Field(
        None, description="methods whose uploads may leave, by name or name:variant; none: any"
    )
    others_receive: list[Receives] = Field(
        ["nothing", "one_model", "every_upload"], description="what a method may hand on to other sites"
    )
    smallest_count: int = Field(
        0, ge=0, le=1_000_000, description="class counts from 1 to one less than this do not leave"
    )
    below: Literal["refuse", "suppress"] = Field(
        "refuse", description="small counts: make no upload at all, or send 0 in their place"
    )
    audit: AuditRule | None = Field(None, description="rules on an audit; none: no audit is made")


def load_policy(path: Path) -> Policy:
    """Read and check ``policy.toml``."""
    policy = parse(Policy, read_toml(path))
    for name in policy.methods or ():
        cls = find(name.partition(":")[0])
        variant = name.partition(":")[2]
        if variant and variant.partition(":")[0] not in {*cls.variants, "personal", "trusting"}:
            raise ConfigError("unknown_variant", f"methods: {name!r}{nearest(variant, cls.variants)}")
    if policy.audit is not None:
        _ = policy.audit.trying  # a mistake in it is named now, not after hours of training
        if policy.audit.limits and not policy.audit.required:
            raise ConfigError("audit", "audit.required is false, but audit has limits: without an audit none can hold")
    return policy


def policy_here(given: Path | None) -> Policy | None:
    """The policy that was named, or the one that lies here; None where there is none."""
    if given is None and not FILE.exists() and not FILE.is_symlink():
        return None
    return load_policy(given or FILE)


def check_method(policy: Policy, spec: str, method: Method[Any]) -> None:
    """Before anything is trained: may uploads of this method leave at all, and reach whom they would reach?"""
    if policy.methods is not None and spec not in policy.methods and spec.partition(":")[0] not in policy.methods:
        allowed = ", ".join(policy.methods) or "none"
        raise PolicyError(
            "policy_method", f"the site's policy does not let uploads of {spec} leave (allowed: {allowed})"
        )
    if method.others_receive not in policy.others_receive:
        words = RECEIVES[method.others_receive].rstrip(".").lower()
        raise PolicyError(
            "policy_others", f"the site's policy does not allow what {spec} hands to other sites: {words}"
        )


def apply_counts(policy: Policy, upload: Upload) -> Upload:
    """Small counts stay: the upload is refused, or says 0 in their place and a total that fits."""
    numbers = [*(upload.class_counts or ()), *([] if upload.num_samples is None else [upload.num_samples])]
    if not any(0 < number < policy.smallest_count for number in numbers):
        return upload
    if policy.below == "refuse":
        raise PolicyError(
            "policy_count", f"a count below smallest_count = {policy.smallest_count} of the site's policy would leave"
        )
    counts, total = upload.class_counts, upload.num_samples
    if counts is not None:
        counts = [0 if number < policy.smallest_count else number for number in counts]
    if total is not None:
        total = sum(counts) if counts is not None else 0 if total < policy.smallest_count else total
    if (counts is not None and not any(counts)) or total == 0:
        raise PolicyError("policy_count", "every count is below smallest_count of the site's policy: nothing is left")
    return replace(upload, class_counts=counts, num_samples=total)


def reasons_against(rule: AuditRule, public: Mapping[str, Any]) -> list[str]:
    """Why what an audit found keeps the upload here, in words; empty where it may leave."""
    if public["kind"] == "nothing":
        return []
    found: dict[str, float | None] = {
        "max_auc": worst_auc(public),
        "max_advantage": worst_advantage(public),
        "max_memorised": public["memorised"] / public["membership"]["members"] if "membership" in public else None,
    }
    words = {"max_auc": "AUC of membership inference, upper end", "max_advantage": "membership advantage"}
    words["max_memorised"] = "share of training images known by heart"
    out = []
    for name, limit in rule.limits.items():
        value = found[name]
        if value is None:
            out.append(f"{words[name]}: not measured for this kind of upload, and the policy sets {name} = {limit:g}")
        elif value > limit:
            out.append(f"{words[name]}: {value:.3f}, over {name} = {limit:g}")
    if public["kind"] == "not_audited" and not out:
        out.append("no audit is built in for this kind of upload, and the policy requires one")
    return out


def worst_auc(public: Mapping[str, Any]) -> float | None:
    """The highest AUC that the evidence cannot rule out, of both attacks; None where membership was not measured."""
    if "membership" not in public:
        return None
    return max(float(public["membership"][name]["auc"]["high"]) for name in ("likelihood_ratio", "confidence"))


def worst_advantage(public: Mapping[str, Any]) -> float | None:
    """The larger membership advantage of both attacks."""
    if "membership" not in public:
        return None
    return max(float(public["membership"][name]["advantage"]) for name in ("likelihood_ratio", "confidence"))
