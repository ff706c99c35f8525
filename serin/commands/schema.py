"""`serin schema`: the spec's JSON schema, for YAML editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from serin.commands.output import show, write_file

SCHEMA_FILE = "spec.schema.json"
MODELINE = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
"""The first line of a spec beside its schema: editors with a YAML language server read it."""


def register(app: typer.Typer) -> None:
    app.command()(schema)


def schema(
    out: Annotated[Path | None, typer.Option(help="Write to this file. [default: standard output]")] = None,
) -> None:
    """The JSON schema of the spec: every key with its type, default and description, for YAML editors."""
    if out is None:
        show(schema_text().rstrip("\n"))
        return
    write_file(out, schema_text())
    show(f"wrote {out}")


def schema_text() -> str:
    """The JSON schema as it is written to a file."""
    from serin.spec.json_schema import editor_schema

    return json.dumps(editor_schema(), indent=1, ensure_ascii=False) + "\n"
