"""The command line: one file a verb. Exit codes: 0 fine, 2 configuration or usage, 3 data, 4 run folder, 5 upload,
6 method, 7 the site's policy, 1 anything unexpected (and `check`: refused), 130 stopped by the user."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from fedbicross.errors import FedBiCrossError, nearest
from fedbicross.freed_memory import keep_freed_memory
from fedbicross.waiting import wait_briefly

STOPPED = 130


class Stopped(Exception):
    """Ctrl-C where more can be said than that the same command goes on."""


def main() -> None:
    """Entry point: an expected error is one line on standard error and its exit code."""
    from fedbicross.cli.app import UsageError, app  # the verbs import from this package

    wait_briefly()
    keep_freed_memory()

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without our letters shows "?" rather than fail a finished run
            stream.reconfigure(errors="replace")
    try:
        status = app(prog_name="fedbicross", standalone_mode=False)
    except FedBiCrossError as error:
        _fail(str(error), error.exit_status)
    except UsageError as error:
        if "\n" in error.format_message():  # no command at all: the message is the whole help
            error.show()
            raise SystemExit(error.exit_code) from None
        _fail(f"error[usage]: {_usage(error)}", error.exit_code)
    except Stopped as stopped:
        _fail(str(stopped), STOPPED)
    except KeyboardInterrupt:
        status = STOPPED
    if status == STOPPED:  # also typer's own answer to Ctrl-C
        _fail("stopped; the same command again goes on", STOPPED)
    raise SystemExit(status or 0)


def _usage(error: Any) -> str:
    """What is wrong with the words typed, and the one word that was probably meant."""
    message = str(error.format_message())
    said, hint, _ = message.partition("Did you mean")
    name = getattr(error, "option_name", None) or getattr(error, "command_name", None)
    if not hint or name is None:
        return message
    # click names up to three words in the order of the alphabet, and typer says so once more
    return f"{said.rstrip(' .(')}{nearest(name, error.possibilities)}"


def _fail(message: str, status: int) -> NoReturn:
    print(" ".join(message.splitlines()), file=sys.stderr)
    raise SystemExit(status) from None
