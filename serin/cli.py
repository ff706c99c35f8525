"""The `serin` command: its commands' names, and how an error becomes a message and an exit code.

It starts in a fraction of a second: the module of a command is imported when that command runs, and what the command
needs when it needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer

from serin.api.progress import progress_lines
from serin.commands.suggest import LazyCommands, SuggestingGroup
from serin.errors import SerinError, file_trouble

MODULES = {
    "pipeline": "init check run etl train export search schema",
    "stack": "up down status deploy doctor env install console backup",
    "runs": "runs",
    "tables": "tables",
    "hosts": "agent controller worker hosts",
    "rollout": "rollout logs retire",
    "lookups": "lookups",
    "models": "models gpus gc",
    "scoring": "predict score explain tune",
    "signing": "trust",
    "captures": "captures",
    "events": "events",
    "watch": "slo drift labels quality",
    "keys": "keys",
    "alerts": "alerts",
}
"""The modules of serin/commands with the commands of each, in the order of help."""


class _Group(SuggestingGroup):
    def __init__(self, *, commands: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(commands=cast("dict[str, Any]", LazyCommands(commands, MODULES)), **settings)


app = typer.Typer(
    name="serin",
    cls=_Group,
    help="From raw tables to a served model: ETL, training, ONNX export, a canary on Triton behind Envoy.",
    epilog="Commands for services and for setting up (agent, install, ...) are in the reference of the documentation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        sys.stdout.write(f"serin {version('serin')}\n")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    del debug, show_version  # main() reads the first, a callback has answered the second


def main() -> None:
    """Runs the command. Exit code 0 only on success; 2 for a wrong spec or argument, 75 for "run it again"."""
    try:
        with progress_lines():
            app()
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has exited
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_fail("interrupted", 130))
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, SerinError):
            sys.exit(_fail(str(error), error.exit_code))
        if isinstance(error, OSError):
            sys.exit(_fail(file_trouble(error), 1))
        bug = "This is a bug in Serin; `serin --debug ...` shows where it happened."
        sys.exit(_fail(f"unexpected {type(error).__name__}: {error}\n{bug}", 1))


def _fail(problem: str, code: int) -> int:
    sys.stderr.write(f"serin: {problem}\n")
    return code


if __name__ == "__main__":
    main()
