"""The `serin` command: its commands' names, and how an error becomes a message and an exit code.

It starts in a fraction of a second: every command imports what it needs when it runs.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from serin.api.progress import progress_lines
from serin.commands import (
    agent,
    alerts,
    backup,
    captures,
    console,
    controller,
    drift,
    explain,
    hosts,
    keys,
    labels,
    models,
    pipeline,
    rollout,
    runs,
    schema,
    search,
    service,
    signing,
    slo,
    stack,
    tuning,
)
from serin.commands.suggest import SuggestingGroup
from serin.errors import SerinError, file_trouble

app = typer.Typer(
    name="serin",
    cls=SuggestingGroup,
    help="From raw tables to a served model: ETL, training, ONNX export, a canary on Triton behind Envoy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.command()
def version() -> None:
    """Show the version."""
    sys.stdout.write(f"serin {importlib.metadata.version('serin')}\n")


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    del debug, show_version  # main() reads the first, a callback has answered the second


for _module in (
    pipeline,
    schema,
    search,
    stack,
    agent,
    runs,
    hosts,
    rollout,
    service,
    slo,
    models,
    signing,
    captures,
    labels,
    drift,
    explain,
    keys,
    tuning,
    alerts,
    console,
    controller,
    backup,
):
    _module.register(app)


def main() -> None:
    """Runs the command. Exit code 0 only on success; 2 for a wrong spec or argument, 75 for "run it again"."""
    try:
        with progress_lines():
            app()
    except SerinError as error:
        if "--debug" in sys.argv:
            raise
        sys.stderr.write(f"serin: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has exited
        sys.exit(1)
    except OSError as error:
        if "--debug" in sys.argv:
            raise
        sys.stderr.write(f"serin: {file_trouble(error)}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("serin: interrupted\n")
        sys.exit(130)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        sys.stderr.write(
            f"serin: unexpected {type(error).__name__}: {error}\n"
            "This is a bug in Serin; `serin --debug ...` shows where it happened.\n"
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
