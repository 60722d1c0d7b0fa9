from __future__ import annotations

import pytest
from pydantic import Field

from fedbicross.errors import ConfigError
from fedbicross.settings import Settings, parse
from small import refuses


class Inner(Settings):
    rate: float = Field(0.1, gt=0)


class Outer(Settings):
    inner: Inner = Field(default_factory=Inner)
    count: int = 1


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        ({"cuont": 2}, "unknown_key", "did you mean 'count'"),
        ({"inner": {"rat": 2.0}}, "unknown_key", "'inner.rat'; did you mean 'rate'"),
        ({"count": "2"}, "bad_value", "count: "),
        ({"count": True}, "bad_value", "count: "),
        ({"inner": {"rate": float("nan")}}, "bad_value", "inner.rate: "),
        ({"inner": {"rate": -1.0}}, "bad_value", "inner.rate: "),
        ({"inner": 3}, "bad_value", "inner: "),
    ],
)
def test_mistakes_are_one_line_and_name_the_place(values: dict[str, object], code: str, words: str) -> None:
    with refuses(ConfigError, code) as caught:
        parse(Outer, values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_good_values_pass() -> None:
    assert parse(Outer, {"inner": {"rate": 2}, "count": 3}).inner.rate == 2
