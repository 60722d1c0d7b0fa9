"""Typed, frozen settings whose mistakes are one-line errors that name the nearest right key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedbicross.errors import ConfigError, RunError, nearest


class Settings(BaseModel):
    """Base of every group of settings: unknown keys, wrong types and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MethodConfig(Settings):
    """Base of every method's settings."""


S = TypeVar("S", bound=Settings)
T = TypeVar("T")


def parse(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """``cls(**values)``, with the first problem as a ``ConfigError`` that says where it is."""
    try:
        return cls(**values)
    except ValidationError as error:
        errors = error.errors()
        # A misspelt key that is required is both unknown and missing; the first of these says what to do.
        first = next((found for found in errors if found["type"] == "extra_forbidden"), errors[0])
        keys = [str(part) for part in first["loc"]]
        path = ".".join([where, *keys] if where else keys)
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                "unknown_key", f"unknown key {path!r}{nearest(keys[-1], _known(cls, keys[:-1]))}"
            ) from None
        if first["type"] == "missing":
            raise ConfigError("missing_key", f"{path!r} is missing") from None
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError("bad_value", f"{path}: {message} (got {_short(first['input'])})") from None


def read_json(kind: type[T], data: bytes, name: str) -> T:
    """JSON that this program kept, as exactly the type that it was; anything else is a ``RunError``."""
    try:
        return TypeAdapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:32] for part in first["loc"])
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise RunError("damaged", f"{name} does not hold what was written there ({problem[:200]})") from None


def read_toml(file: Path) -> dict[str, Any]:
    """A TOML file as a dict."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError("no_config", f"no configuration file {str(file)!r}") from None
    except OSError as error:
        raise ConfigError("bad_toml", f"{file}: {error}") from None
    return parse_toml(data, file)


def parse_toml(data: bytes, file: Path) -> dict[str, Any]:
    """The content of a TOML file as a dict."""
    try:
        return tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError("bad_toml", f"{file}: {error}") from None


def as_toml(settings: Settings) -> str:
    """Fully resolved settings as TOML; what is not set is left out."""
    return tomli_w.dumps(_without_none(settings.model_dump()))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _known(cls: type[BaseModel], path: list[str]) -> list[str]:
    """The keys allowed at ``path`` below ``cls``."""
    for key in path:
        annotation = cls.model_fields[key].annotation if key in cls.model_fields else None
        options = [annotation, *get_args(annotation)]
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if inner is None:
            return []
        cls = inner
    return list(cls.model_fields)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
