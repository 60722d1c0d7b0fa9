"""All methods by name. Adding one means one file here and one line below (see CONTRIBUTING.md).

Methods of other packages come in by their entry points (`methods.plugins`), or as classes from Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbicross.errors import ConfigError, nearest
from fedbicross.methods.analytic import Analytic
from fedbicross.methods.base import Method
from fedbicross.methods.centralised import Centralised
from fedbicross.methods.centralised_head import CentralisedHead
from fedbicross.methods.co_boosting import CoBoosting
from fedbicross.methods.dafl import DAFL
from fedbicross.methods.dense import DENSE
from fedbicross.methods.e_fedisca import EFedISCA
from fedbicross.methods.ensemble import EnsembleMethod
from fedbicross.methods.falcon import Falcon
from fedbicross.methods.fedavg import FedAvg
from fedbicross.methods.fedbicross import FedBiCross
from fedbicross.methods.fedcgs import FedCGS
from fedbicross.methods.fedisca import FedISCA
from fedbicross.methods.fedlmg import FedLMG
from fedbicross.methods.fedpft import FedPFT
from fedbicross.methods.local_head import LocalHead
from fedbicross.methods.local_only import LocalOnly
from fedbicross.methods.majority import Majority
from fedbicross.methods.plugins import Plugins
from fedbicross.methods.primum import Primum
from fedbicross.settings import parse

METHODS: dict[str, type[Method[Any]]] = {
    "majority": Majority,
    "local_only": LocalOnly,
    "centralised": Centralised,
    "fedavg": FedAvg,
    "ensemble": EnsembleMethod,
    "dafl": DAFL,
    "dense": DENSE,
    "co_boosting": CoBoosting,
    "fedisca": FedISCA,
    "e_fedisca": EFedISCA,
    "fedbicross": FedBiCross,
    "primum": Primum,
    "local_head": LocalHead,
    "centralised_head": CentralisedHead,
    "falcon": Falcon,
    "fedpft": FedPFT,
    "fedcgs": FedCGS,
    "analytic": Analytic,
    "fedlmg": FedLMG,
}
PLUGINS = Plugins(METHODS)  # and those that are not ours

GATED = "personal"  # after the name of a method that ends with one model for all: the client's gate decides about it
TRUSTING = "trusting"  # after any name: every upload that passes the door is used as it is (`parts.defence`)


def method_names() -> list[str]:
    """Every ``name`` and ``name:variant`` of our own."""
    return [full for name, cls in METHODS.items() for full in (name, *(f"{name}:{v}" for v in cls.variants))]


def find(name: str) -> type[Method[Any]]:
    """The class of this name: ours, one that was given from Python, or a plug-in's."""
    cls = METHODS.get(name) or PLUGINS.find(name)
    if cls is None:
        raise ConfigError("unknown_method", f"unknown method {name!r}{nearest(name, [*METHODS, *PLUGINS.names()])}")
    return cls


def create(spec: str, table: Mapping[str, Mapping[str, Any]] | None = None, quick: bool = False) -> Method[Any]:
    """A method from ``name`` or ``name:variant``.

    Either may be followed by ``:personal``: the gate at the client, and by ``:trusting``: no defence at the server.
    ``table`` holds settings by method: those under ``name`` yield to the variant, those under ``name:variant`` win.
    """
    name, _, variant = spec.partition(":")
    cls, table = find(name), table or {}
    inner, _, last = spec.rpartition(":")
    if last == TRUSTING and inner and variant not in cls.variants:
        method = create(inner, table, quick)
        method.trusting = True
        return method
    if last == GATED and variant not in cls.variants:  # a method may have a variant of this name
        method = create(inner, table, quick)
        if method.gate_problem:
            raise ConfigError("no_gate", f"{inner} cannot be {GATED}: {method.gate_problem}")
        method.gated = True
        return method
    if variant and variant not in cls.variants:
        hint = nearest(variant, cls.variants) if cls.variants else "; it has none"
        raise ConfigError("unknown_variant", f"{name} has no variant {variant!r}{hint}")
    values = {**(cls.quick_settings if quick else {}), **table.get(name, {}), **cls.variants.get(variant, {})}
    if variant:
        values |= table.get(spec, {})
    return cls(parse(cls.Config, values, f"method.{spec}"))
