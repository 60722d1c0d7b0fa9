"""The command line: one file a verb. Exit codes: 0 fine, 2 configuration, 3 data, 4 run folder, 5 upload, 6 method,
1 anything unexpected, 130 stopped by the user."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: an expected error is one line on standard error and its exit code."""
    from fedbicross.cli.app import app
    from fedbicross.errors import FedBiCrossError

    try:
        app()
    except FedBiCrossError as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        print("stopped; `fedbicross resume DIR` continues the run", file=sys.stderr)
        raise SystemExit(130) from None
