from __future__ import annotations

import pickle

import pytest

from fedbicross.errors import MAX_MESSAGE, FedBiCrossError, PolicyError, UploadError, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("north 'ä' 病院 [bold]", "north 'ä' 病院 [bold]"),
        ("\x1b[2Jok", "\\x1b[2Jok"),  # clears the screen
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\bc", "a\\rb\\x08c"),
        ("\u202ecba", "\\u202ecba"),  # turns the direction of writing
        ("\x9b31m", "\\x9b31m"),  # the same as ESC [ on some terminals
        ("\udcff", "\\udcff"),  # a file name that is no text
    ],
)
def test_a_terminal_obeys_nothing(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_message_is_one_printable_line_of_bounded_length() -> None:
    error = UploadError("code", "first\nsecond \x1b[31m")
    assert str(error) == "error[code]: first second \\x1b[31m"
    long = FedBiCrossError("code", "begin" + "\0" * 10**6 + "end").args[0]
    assert 0.9 * MAX_MESSAGE < len(long) <= MAX_MESSAGE
    assert long.startswith("begin\\x00") and " ... " in long and long.endswith("\\x00end")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.code, str(again)) == (UploadError, "code", str(error))


def test_a_policy_has_no_code_that_a_server_would_not_know_it_by() -> None:
    assert pickle.loads(pickle.dumps(PolicyError("policy_new", "no"))).code == "policy_new"
    with pytest.raises(ValueError, match="begins with 'policy_'"):
        PolicyError("audit", "no")
