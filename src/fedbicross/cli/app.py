"""The verbs, put together."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fedbicross import __version__
from fedbicross.cli import (
    audit,
    bench,
    check,
    client,
    data,
    demo,
    federation,
    flower,
    listing,
    models,
    report,
    resume,
    run,
    server,
    track,
    validate,
)

# Base of every complaint about the words typed. Typer lost its public name for it when it took click in.
UsageError: type[Any] = typer.BadParameter.__mro__[1]


WHOLE = 1000  # characters of a command's line in the list of commands: none is cut off


class Command(TyperCommand):
    """Help without the backslashes that some versions of typer put before brackets."""

    def get_help(self, ctx: Any) -> str:
        """The text after ``--help``."""
        return super().get_help(ctx).replace("\\[", "[")

    def get_short_help_str(self, limit: int = WHOLE) -> str:
        """Its line in the list of commands: the whole first sentence."""
        return super().get_short_help_str(max(limit, WHOLE))


class Group(TyperGroup):
    """The same for several commands."""

    def get_help(self, ctx: Any) -> str:
        """The text after ``--help``."""
        return super().get_help(ctx).replace("\\[", "[")


app = typer.Typer(
    name="fedbicross",
    cls=Group,
    help="One-shot, personalised federated learning for medical images: one file out of each hospital, one file back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    del version


app.command("demo")(demo.demo)
app.command("run")(run.run)
app.command("resume")(resume.resume)
app.command("report")(report.report)
app.command("track")(track.track)
app.command("check")(check.check)
app.command("validate")(validate.validate)
app.command("predict")(models.predict)
app.command("export")(models.export)
app.command("list")(listing.listing)
app.add_typer(audit.app, name="audit")
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.add_typer(federation.app, name="federation")
app.add_typer(client.app, name="client")
app.add_typer(server.app, name="server")
app.add_typer(flower.app, name="flower")

for command in app.registered_commands:
    command.cls = Command
for group in app.registered_groups:
    group.cls = Group
    for command in group.typer_instance.registered_commands if group.typer_instance else ():
        command.cls = Command
