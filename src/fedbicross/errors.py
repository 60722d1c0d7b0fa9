"""Every error that a user can cause, with a stable code and an exit status.

A message is one line, names the offending thing, and says what to do. It may quote a stranger's file, so it is made
printable and bounded here, once. The command line prints ``error[CODE]: message`` and exits with ``exit_status``;
anything else that escapes is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_MESSAGE = 1000  # characters


class FedBiCrossError(Exception):
    """Base of all expected errors."""

    exit_status = 1

    def __init__(self, code: str, message: str) -> None:
        line = printable(" ".join(message.splitlines()))
        if len(line) > MAX_MESSAGE:  # both ends count: what is wrong, and what to do
            line = f"{line[: MAX_MESSAGE // 2 - 5]} ... {line[5 - MAX_MESSAGE // 2 :]}"
        super().__init__(line)
        self.code = code

    def __reduce__(self) -> tuple[type[FedBiCrossError], tuple[str, str]]:
        return type(self), (self.code, self.args[0])  # so that it comes back whole from another process

    def __str__(self) -> str:
        return f"error[{self.code}]: {self.args[0]}"


class ConfigError(FedBiCrossError):
    """A setting, name or option is unknown, of the wrong type, or out of range."""

    exit_status = 2


class DataError(FedBiCrossError):
    """Images, labels or a download are missing, damaged or contradictory."""

    exit_status = 3


class RunError(FedBiCrossError):
    """A run folder cannot be written, locked, or continued."""

    exit_status = 4


class UploadError(FedBiCrossError):
    """A file from outside was refused."""

    exit_status = 5


class MethodError(FedBiCrossError):
    """A method cannot work with what it was given."""

    exit_status = 6


class PolicyError(FedBiCrossError):
    """The site's own policy does not let something leave."""

    exit_status = 7
    begins = "policy_"  # every code: by it, and by nothing else, a server knows that a site has decided

    def __init__(self, code: str, message: str) -> None:
        if not code.startswith(self.begins):
            raise ValueError(f"a code of a policy begins with {self.begins!r}, not {code!r}")
        super().__init__(code, message)


def printable(text: str) -> str:
    """Text without control characters: each is replaced by its escape, so that it cannot steer a terminal."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'fedavg'?`` or, where nothing is close, the list of known names."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(options)}"
