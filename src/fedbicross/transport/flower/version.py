"""Which versions of Flower will do."""

from __future__ import annotations

from importlib import metadata

from fedbicross.errors import ConfigError

TESTED = "1.41.0"
OLDEST, NEWEST = (1, 41), (1, 42)  # both included; 1.42 had a smoke test only
INSTALL = "pip install 'fedbicross[flower]'"


def require_flower() -> str:
    """The version of Flower that is installed; a ``ConfigError`` with the command to type if it will not do."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise ConfigError("no_flower", f"Flower is not installed; {INSTALL}") from None
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= parts <= NEWEST:
        wanted = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        raise ConfigError("flower_version", f"Flower {version} is installed, {wanted} is known to work; {INSTALL}")
    return version
