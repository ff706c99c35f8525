"""`serin labels`: add the truth about answers that were given, and show how many answers have one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.output import Json, show, show_json

if TYPE_CHECKING:
    from serin.pipeline.labels import LabelsAdded

Model = Annotated[str, typer.Argument(help="The model's name.")]
LabelFile = Annotated[Path, typer.Argument(help="A table of labels: Parquet, CSV or JSON lines.")]
Id = Annotated[
    str | None,
    typer.Option("--id", metavar="COLUMN", help="The column with the request's id. [default: _id]"),
]
Row = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column with the row's number in its request, from 0; not needed for requests of one row. "
        "[default: _row]",
    ),
]
ClientId = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The column with the client's own id. [default: _client_id]"),
]
On = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN",
        help="A request column to join by instead of an id; may be repeated. [default: data.id and data.time]",
    ),
]
Value = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column with the target itself. [default: _label, target or label, else it is computed from the "
        "columns of data.target]",
    ),
]
Time = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column that says which of two labels for the same row is newer. [default: the later arrival]",
    ),
]
Version = Annotated[
    str, typer.Option(help="The version whose target the labels are. [default: live, else the newest]")
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The truth about a model's answers, which is known later.", no_args_is_help=True)
    group.command("add")(add_labels)
    app.add_typer(group, name="labels")


def add_labels(
    model: Model,
    file: LabelFile,
    id_column: Id = None,
    row: Row = None,
    client_id: ClientId = None,
    on: On = None,
    value: Value = None,
    time: Time = None,
    version: Version = "",
    as_json: Json = False,
) -> None:
    """Add labels. Late, repeated and corrected ones are normal: of several for one row the newest counts.

    A label is about the request with its id (and row), about the request with the client's id, or about every request
    with the same values in the columns of `--on`. A label whose request is not recorded is kept until it is.
    """
    from serin.commands.predictions import open_bundle
    from serin.formats.schema import read_schema
    from serin.monitoring.quality.labels import Columns
    from serin.pipeline.labels import add, read_label_file

    bundle = open_bundle(model, version)
    columns = Columns(id=id_column, row=row, client_id=client_id, on=tuple(on or ()), value=value, time=time)
    table = read_label_file(file, read_schema(Path(bundle.path)), columns, model)
    done = add(bundle, table, columns)
    if as_json:
        show_json(dataclasses.asdict(done))
    else:
        _show(model, done)


def _show(model: str, done: LabelsAdded) -> None:
    if not done.stored:
        show(f"{done.rows:,} rows, nothing new: the same labels were added before")
    else:
        show(f"{done.stored:,} labels for {model}, joined by {done.key}")
    for count, what in (
        (done.matched, "are about a recorded row"),
        (done.unknown, "are about no recorded row so far; they are kept and joined when it is recorded"),
        (done.ambiguous, "have a client's id that several requests share, and are not used"),
        (done.unclear, "name no row of a request with several rows, and are not used"),
        (done.missing, "rows have no label"),
        (done.without_key, "rows have a null in the key, and are not used"),
        (done.repeated, "rows are replaced by a later one in the same table"),
    ):
        if count:
            show(f"  {count:,} {what}")
