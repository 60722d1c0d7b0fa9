"""Methods of other people: classes from Python, and entry points of installed packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from fedbicross.errors import ConfigError
from fedbicross.methods import METHODS, PLUGINS, create, find
from fedbicross.methods.fedavg import FedAvg
from fedbicross.methods.majority import Majority
from fedbicross.methods.plugins import GROUP, Plugins
from small import refuses


class Own(Majority):
    name = "own"
    summary = "mine"
    variants = {"personal": {}}


class Later(Majority):
    name = "own"
    summary = "mine, mended"


class Elsewhere(Majority):
    name = "elsewhere"


NOT_A_METHOD = 3


def offered(*points: tuple[str, str]) -> Plugins:
    plugins = Plugins(METHODS)
    plugins.__dict__["installed"] = {name: EntryPoint(name, value, GROUP) for name, value in points}
    return plugins


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test gives is forgotten after it."""
    monkeypatch.setattr(PLUGINS, "given", {})


def test_a_class_is_found_by_its_name_and_a_later_one_takes_its_place(known: None) -> None:
    assert PLUGINS.give(Own) == "own"
    assert find("own") is Own and isinstance(create("own"), Own)
    assert not create("own:personal").gated, "it has a variant of this name"
    PLUGINS.give(Later)  # a cell of a notebook that was run again
    assert find("own") is Later


def test_a_known_name_is_suggested(known: None) -> None:
    PLUGINS.give(Own)
    with pytest.raises(ConfigError, match="did you mean 'own'"):
        find("owm")


def incomplete() -> type[Any]:
    from fedbicross.methods.base import Method

    return type("Half", (Method,), {"name": "half", "summary": "half of one"})


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (NOT_A_METHOD, "must be a class derived from fedbicross.Method"),
        (Own(Own.Config()), "must be a class"),
        (incomplete(), "Half lacks fuse, personalize, upload, upload_summary"),
        (type("Up", (Majority,), {"name": "../up"}), "small letters"),
        (type("Long", (Majority,), {"name": "a" * 65}), "small letters"),
        (type("Number", (Majority,), {"name": 3}), "small letters"),
        (type("Taken", (FedAvg,), {}), "'fedavg' is a method of fedbicross"),
    ],
)
def test_what_is_no_method_is_refused(cls: Any, words: str) -> None:
    plugins = Plugins(METHODS)
    with pytest.raises(ConfigError, match=words) as caught:
        plugins.give(cls)
    assert caught.value.code == "plugin" and not plugins.given


def test_an_entry_point_is_loaded_when_asked_for_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = offered(("elsewhere", f"{__name__}:Elsewhere"), ("broken", "no.such.module:Thing"))
    assert plugins.names() == ["elsewhere", "broken"] and not plugins.given
    assert plugins.find("elsewhere") is Elsewhere
    assert plugins.find("unknown") is None


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (("broken", "no.such.module:Thing"), "'no.such.module:Thing' of method 'broken' cannot be loaded"),
        (("nothing", f"{__name__}:Nothing"), "cannot be loaded: AttributeError"),
        (("number", f"{__name__}:NOT_A_METHOD"), "must be a class"),
        (("other", f"{__name__}:Elsewhere"), "calls itself 'elsewhere', not 'other'"),
    ],
)
def test_a_broken_plug_in_is_one_line_that_names_it(point: tuple[str, str], words: str) -> None:
    with refuses(ConfigError, "plugin", words):
        offered(point).find(point[0])


def test_a_plug_in_cannot_take_our_names(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("fedavg", f"{__name__}:Elsewhere", GROUP), EntryPoint("elsewhere", "x:y", GROUP)]
    monkeypatch.setattr("fedbicross.methods.plugins.entry_points", lambda group: points if group == GROUP else [])
    assert list(Plugins(METHODS).installed) == ["elsewhere"]
