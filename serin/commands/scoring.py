"""A version in use: `serin predict` scores rows, `serin explain` shows which raw columns made the scores, `serin tune`
measures the serving settings on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from serin.commands.arguments import ModelVersion, Since, Until, numbered, open_store, utc_seconds
from serin.commands.output import Json, counted, show, show_json
from serin.spec.names import split_version

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
_RowsToExplain = Annotated[
    Path | None, typer.Argument(help="Rows to explain: Parquet, CSV, JSON lines.", show_default=False)
]
_Request = Annotated[
    str | None, typer.Option("--id", help="Explain the answer to this recorded request instead.")
]
_RequestRow = Annotated[int | None, typer.Option("--row", min=0, help="For --id: only this row of it.")]
_Where = Annotated[
    str | None,
    typer.Option(
        "--where", help="Explain recorded answers for which this is true, such as '_answer_score > 0.8'."
    ),
]
_Explained = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write all contributions here: .parquet, .csv or .jsonl."),
]
_FirstRows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        "-n",
        min=1,
        help="Explain the first rows only. [default: all; 20 are shown]",
        show_default=False,
    ),
]
RequestRows = Annotated[
    str,
    typer.Option(
        help="Rows in one request, as clients send them: 8, or with shares 1:0.9,64:0.1. "
        "[default: export.batch_mix of its spec, else 1]"
    ),
]
MaxRows = Annotated[
    int | None,
    typer.Option(
        min=1, help="The most rows that a client sends at once; without it the batch limit is not tuned."
    ),
]
GpuPrice = Annotated[
    float,
    typer.Option(
        min=0.01,
        help="The price of a GPU with its cores over that of the cores alone: it must be that many times faster.",
    ),
]


def register(app: typer.Typer) -> None:
    for command in (predict, score, explain, tune):
        app.command()(command)


def predict(
    name: ModelVersion,
    rows: _Rows,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Write here instead of stdout (which gets CSV).")
    ] = None,
    batch: Annotated[
        bool, typer.Option("--batch", help="Score in bulk with Dask, without the stack.")
    ] = False,
    scheduler: Annotated[
        str | None,
        typer.Option(help="For --batch: the address of a Dask scheduler. [default: in this process]"),
    ] = None,
    device: _Device = "auto",
    grpc: Annotated[bool, typer.Option("--grpc", help="Call the gateway over gRPC instead of HTTP.")] = False,
    ids: _Ids = False,
) -> None:
    """Score rows through the gateway, or in bulk without it (--batch). Without a version, the gateway chooses it; in
    bulk it is the live one, else the newest."""
    from serin.commands.predictions import open_bundle, predict_in_bulk, predict_through_gateway

    if batch and ids:
        raise typer.BadParameter("--ids is for requests through the gateway; --batch sends none")
    bundle = open_bundle(name)
    if batch:
        count = predict_in_bulk(bundle, rows, out, scheduler=scheduler, device=device)
    else:
        protocol: Literal["http", "grpc"] = "grpc" if grpc else "http"
        count = predict_through_gateway(
            bundle,
            Path(rows),
            None if out is None else Path(out),
            pinned=split_version(name)[1] is not None,
            protocol=protocol,
            ids=ids,
        )
    if out is not None:
        show(f"{counted(count, 'row')} scored by {bundle.model}, written to {out}")


def score(
    model: ModelVersion,
    rows: Annotated[
        str,
        typer.Argument(
            help="Rows to score: a folder, a glob or a URL, such as 'rows/date=*/*.parquet', or as in data.tables "
            "'{delta: PATH}', '{sql: QUERY, connection: env:URI, order_by: COLUMN}'."
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            help="The target: a folder, '{delta: PATH}' (also s3://), or '{table: NAME, connection: env:URI}'.",
        ),
    ],
    since: Annotated[
        str | None,
        typer.Option(
            help="Only files whose name behind the fixed part of ROWS is at least this, such as date=2026-01-31; "
            "versions of a Delta table from this on; of a query rows whose first order_by column is at least this."
        ),
    ] = None,
    late: Annotated[
        bool, typer.Option("--late", help="Also files that come before one that was scored.")
    ] = False,
    scheduler: Annotated[
        str | None, typer.Option(help="The address of a Dask scheduler. [default: in this process]")
    ] = None,
    device: _Device = "cpu",
    as_json: Json = False,
) -> None:
    """Score the rows that have come since the last run, each once. [default: the live version, else the newest]

    The run appears whole, with its watermark. A run that was killed is completed by the next one. Flow
    `score/scheduled` does the same.
    """
    from serin.pipeline.score import score_new

    done = score_new(model, rows, out, since=since, late=late, scheduler=scheduler, device=device)
    if as_json:
        show_json(None if done is None else done.to_json())
    elif done is None:
        show("no new rows")
    else:
        run, receipt = done.run, done.receipt
        paid = "" if receipt.cost is None else f", cost {receipt.cost:,.4f}"
        speed = f"{receipt.seconds:,.1f} s, {receipt.rows_per_s or 0:,.0f} rows/s{paid}"
        show(f"{counted(run.rows, 'row')} scored by {run.release} ({speed})")


def explain(
    model: ModelVersion,
    rows: _RowsToExplain = None,
    request: _Request = None,
    row: _RequestRow = None,
    where: _Where = None,
    since: Since = None,
    until: Until = None,
    out: _Explained = None,
    number: _FirstRows = None,
    as_json: Json = False,
) -> None:
    """Show which raw columns made the score of each row, the largest contributions first. [default: live, else
    the newest; recorded answers: the version and edition that gave each]

    Computed in this process: TreeSHAP for trees, integrated gradients for networks. The contributions of a row and the
    base value add up to its margin: log-odds for a probability, the value itself in a regression.
    """
    if [rows, request, where].count(None) != 2:
        raise typer.BadParameter("name one: a file with rows, --id REQUEST or --where CONDITION")
    recorded = request or where
    needs = {"--row": (row, request), "--since": (since, recorded), "--until": (until, recorded)}
    _check_fit({**needs, "--rows": (number, rows or where)})
    if rows is not None:
        from serin.commands.explained import explain_file

        explain_file(model, rows, number=number, out=out, as_json=as_json)
        return
    from serin.api.recorded import Period
    from serin.commands.reasons import explain_request, explain_where

    name, version = numbered(model)
    period = Period(version=version, since=utc_seconds(since), until=utc_seconds(until))
    if request is not None:
        explain_request(name, request, period, row=row, out=out, as_json=as_json)
    elif where is not None:
        explain_where(name, where, period, number=number, out=out, as_json=as_json)


def _check_fit(options: Mapping[str, tuple[object, object]]) -> None:
    """Refuses an option without what it is about."""
    for option, (given, needed) in options.items():
        if given is not None and needed is None:
            about = {"--row": "--id", "--rows": "a file or --where"}.get(option, "--id or --where")
            raise typer.BadParameter(f"{option} is for {about}")


def tune(
    model: ModelVersion,
    rows: RequestRows = "",
    max_rows: MaxRows = None,
    gpu_price: GpuPrice = 1.0,
    as_json: Json = False,
) -> None:
    """Measure which instances, threads, queue delay and batch limit give the most requests/s that keep `objectives`.
    [default: the live version, else the newest]

    The next release uses them. Where there is a GPU and the model was exported for one, both devices are tuned and the
    one worth its price is chosen. A separate Triton is used: live releases are not touched, but share the machine's
    cores with it.
    """
    from serin.commands.predictions import open_bundle
    from serin.serving.triton.repository import share_tuned
    from serin.serving.tuning.report import findings, to_json, values, write_report
    from serin.serving.tuning.requests import declared_mix, parse_mix
    from serin.serving.tuning.tune import Tuner
    from serin.spec.stored import stored_objectives

    bundle = open_bundle(model)
    try:
        mix = parse_mix(rows) if rows else declared_mix(bundle)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    promised = stored_objectives(Path(bundle.path))
    tuner = Tuner(
        bundle=bundle,
        limit_ms=promised.latency_ms,
        share=promised.latency_share,
        mix=mix,
        gpu_price=gpu_price,
        largest_request_rows=max_rows,
    )
    tuning = tuner.run()
    settings = write_report(tuning)
    share_tuned(open_store(), bundle)
    if as_json:
        show_json(to_json(tuning, settings))
        return
    for line in findings(tuning):
        show(line)
    lines = {f"{key}: {value}": why for key, (value, why) in values(tuning).items()}
    for line, why in lines.items():
        show(f"  {line:<{max(map(len, lines))}}  {why}")
    show(f"settings {settings}")
    show(
        f"next: releases of {bundle.model} that start from now on use these values, unless their spec sets others"
    )
