"""Threads wait briefly unless the user says otherwise, and that is settled before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedbicross.waiting import BRIEFLY, SAID_BY_USER, wait_briefly


def test_set_where_nothing_is_said() -> None:
    environment = {"PATH": "x"}
    wait_briefly(environment)
    assert environment == {"PATH": "x", **BRIEFLY}


@pytest.mark.parametrize("name", SAID_BY_USER)
def test_the_user_is_not_overruled(name: str) -> None:
    environment = {name: "1"}
    wait_briefly(environment)
    assert environment == {name: "1"}


def test_the_command_line_says_it_before_torch() -> None:
    probe = (
        "import os, sys, fedbicross.cli as cli\n"
        "import fedbicross.cli.app\n"
        "def app(**_): print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "fedbicross.cli.app.app = app\n"
        "cli.main()"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SAID_BY_USER}
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=environment)
    assert out.stdout.strip() == f"{BRIEFLY['GOMP_SPINCOUNT']} False", out.stderr
