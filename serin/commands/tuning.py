"""`serin tune`: the serving settings of a model, measured on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from serin.commands.output import Json, show, show_json

Limit = Annotated[
    float | None,
    typer.Option(min=0.1, help="The p99 limit in milliseconds. [default: serving.p99_ms of its spec]"),
]
Rows = Annotated[
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
    app.command()(tune)


def tune(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[
        str, typer.Option(help="A number or an alias. [default: the live one, else the newest]")
    ] = "",
    p99_ms: Limit = None,
    rows: Rows = "",
    max_rows: MaxRows = None,
    gpu_price: GpuPrice = 1.0,
    seconds: Annotated[float, typer.Option(min=20, help="The approximate time limit in seconds.")] = 240.0,
    as_json: Json = False,
) -> None:
    """Measure which instances, threads, queue delay and batch limit give the most requests/s below the p99 limit.

    The next release uses them. Where there is a GPU and the model was exported for one, both devices are tuned and the
    one worth its price is chosen. A separate Triton is used: live releases are not touched, but share the machine's
    cores with it.
    """
    from serin.commands.predictions import open_bundle
    from serin.serving.triton.repository import serving_settings
    from serin.serving.tuning.report import findings, to_json, values, write_report
    from serin.serving.tuning.requests import declared_mix, parse_mix
    from serin.serving.tuning.tune import Tuner

    bundle = open_bundle(model, version)
    try:
        mix = parse_mix(rows) if rows else declared_mix(bundle)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    limit = p99_ms or serving_settings(bundle).p99_ms
    tuner = Tuner(
        bundle=bundle,
        p99_ms=limit,
        mix=mix,
        gpu_price=gpu_price,
        largest_request_rows=max_rows,
        budget_s=seconds,
    )
    tuning = tuner.run()
    settings, plot = write_report(tuning)
    if as_json:
        show_json(to_json(tuning, settings, plot))
        return
    for line in findings(tuning):
        show(line)
    lines = {f"{key}: {value}": why for key, (value, why) in values(tuning).items()}
    for line, why in lines.items():
        show(f"  {line:<{max(map(len, lines))}}  {why}")
    show(f"settings {settings}\nplot     {plot}")
    show(f"next: releases of {model} that start from now on use these values, unless their spec sets others")
