"""`serin schema`: the spec's JSON schema, for YAML editors, and its reference page."""

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
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The reference page instead of the JSON schema.")
    ] = False,
) -> None:
    """The JSON schema of the spec: every key with its type, default and description, for YAML editors."""
    from serin.spec.reference.markdown import spec_reference

    text = spec_reference() if markdown else schema_text()
    if out is None:
        show(text.rstrip("\n"))
        return
    write_file(out, text)
    show(f"wrote {out}")


def schema_text() -> str:
    """The JSON schema as it is written to a file."""
    from serin.spec.reference.json_schema import spec_schema

    return json.dumps(spec_schema(), indent=1, ensure_ascii=False) + "\n"
