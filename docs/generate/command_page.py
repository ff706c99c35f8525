"""Renders the command reference from the typer application: every command with its arguments and options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.main import get_command

from serin.cli import app

_HEAD = """# The `serin` command

This page is generated from the command itself; `serin COMMAND --help` prints the same text.

| exit code | meaning |
|---|---|
| 0 | the thing asked for happened |
| 1 | it failed; the message names the problem, where it is and what to do next |
| 2 | the spec or an argument is wrong |
| 75 | it was interrupted after saving: run the same command again |
"""


def render() -> str:
    command = get_command(app)
    return "\n".join(
        [_HEAD, "These options stand before the command:\n", _options(command), *_commands(command)]
    )


def _commands(group: Any, path: str = "serin") -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        full = f"{path} {name}"
        yield f"\n{'#' * (1 + full.count(' '))} {full}\n"
        yield f"{(command.help or '').strip()}\n"
        if hasattr(command, "commands"):
            yield from _commands(command, full)
        else:
            usage = command.get_usage(typer.Context(command, info_name=full))
            yield f"```text\n{usage.removeprefix('Usage: ')}\n```\n"
            yield _options(command)


def _options(command: Any) -> str:
    context = typer.Context(command, info_name="serin")
    records = [
        parameter.get_help_record(context) for parameter in command.params if "--help" not in parameter.opts
    ]
    rows = [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in filter(None, records)]
    return "\n".join(["| argument or option | meaning |", "|---|---|", *rows, ""]) if rows else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
