"""`serin tune`: the serving settings of a model, measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serin.commands.arguments import ModelVersion
from serin.commands.output import Json, show, show_json

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
    model: ModelVersion,
    rows: Rows = "",
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
    show(
        f"next: releases of {bundle.model} that start from now on use these values, unless their spec sets others"
    )
