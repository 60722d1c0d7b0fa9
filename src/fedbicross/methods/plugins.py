"""Methods that are not ours: classes given from Python, and those that installed packages offer.

A package offers a method by an entry point; the name on its left is the method's::

    [project.entry-points."fedbicross.methods"]
    keep_head = "my_package.keep_head:KeepHead"

Only what is installed is loaded, and only when it is asked for by name: no run folder and no configuration can bring
code along.
"""

from __future__ import annotations

import re
from collections.abc import Container
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fedbicross.errors import ConfigError
from fedbicross.methods.base import Method

GROUP = "fedbicross.methods"
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # it becomes part of file names


class Plugins:
    """Methods by name, beside those in ``taken``, whose names they cannot have."""

    def __init__(self, taken: Container[str]) -> None:
        self.taken = taken
        self.given: dict[str, type[Method[Any]]] = {}

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """What packages offer, not yet loaded."""
        return {point.name: point for point in entry_points(group=GROUP) if point.name not in self.taken}

    def names(self) -> list[str]:
        """Everything that ``find`` would find."""
        return list(dict.fromkeys([*self.given, *self.installed]))

    def give(self, cls: type[Method[Any]]) -> str:
        """Make a class known to this process, in place of an earlier one of its name; returns the name."""
        name = self._check(cls, "a method")
        self.given[name] = cls
        return name

    def find(self, name: str) -> type[Method[Any]] | None:
        """The class, or None."""
        if name in self.given or name not in self.installed:
            return self.given.get(name)
        point = self.installed[name]
        try:
            cls = point.load()
        except Exception as error:  # a stranger's module may raise anything
            problem = f"the plug-in {point.value!r} of method {name!r} cannot be loaded"
            raise ConfigError("plugin", f"{problem}: {type(error).__name__}: {error}") from error
        if self._check(cls, f"the plug-in {point.value!r}") != name:
            raise ConfigError("plugin", f"the plug-in {point.value!r} calls itself {cls.name!r}, not {name!r}")
        self.given[name] = cls
        return self.given[name]

    def _check(self, cls: object, what: str) -> str:
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise ConfigError("plugin", f"{what} must be a class derived from fedbicross.Method (got {cls!r})")
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing or not hasattr(cls, "summary"):
            raise ConfigError("plugin", f"{cls.__name__} lacks {', '.join(missing) or 'summary'}")
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError("plugin", f"{cls.__name__}.name: small letters, digits and _ (got {name!r})")
        if name in self.taken:
            raise ConfigError("plugin", f"{cls.__name__}.name: {name!r} is a method of fedbicross; choose another")
        return name
