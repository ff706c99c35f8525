"""The command `predict`: scores rows through the gateway, or in bulk without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from serin.commands.output import counted, show

_Rows = Annotated[
    str, typer.Argument(help="Rows to score: Parquet, CSV, JSON lines; --batch: a folder, glob or URL too.")
]
_Device = Annotated[
    Literal["auto", "cpu", "gpu"],
    typer.Option(help="For --batch: where. auto: a GPU for a version that was exported for one."),
]
_Ids = Annotated[
    bool,
    typer.Option(
        "--ids", help="Add the request's id and the row in it (_id, _row), which `serin labels add` joins by."
    ),
]


def predict(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    rows: _Rows,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Write here instead of stdout (which gets CSV).")
    ] = None,
    version: Annotated[
        str, typer.Option(help="A number or an alias. [default: the version that the gateway chooses]")
    ] = "",
    batch: Annotated[
        bool, typer.Option("--batch", help="Score in bulk with Dask, without the stack.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers for --batch. [default: one per core]")
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="For --batch: the address of a Dask scheduler. [default: in this process]"),
    ] = None,
    device: _Device = "auto",
    grpc: Annotated[bool, typer.Option("--grpc", help="Call the gateway over gRPC instead of HTTP.")] = False,
    ids: _Ids = False,
) -> None:
    """Score rows through the gateway, or in bulk without it (--batch)."""
    from serin.commands.predictions import open_bundle, predict_in_bulk, predict_through_gateway

    if batch and ids:
        raise typer.BadParameter("--ids is for requests through the gateway; --batch sends none")
    bundle = open_bundle(model, version)
    if batch:
        count = predict_in_bulk(bundle, rows, out, workers=workers, scheduler=scheduler, device=device)
    else:
        protocol: Literal["http", "grpc"] = "grpc" if grpc else "http"
        count = predict_through_gateway(
            bundle,
            Path(rows),
            None if out is None else Path(out),
            pinned=bool(version),
            protocol=protocol,
            ids=ids,
        )
    if out is not None:
        show(f"{counted(count, 'row')} scored by {model}, written to {out}")
