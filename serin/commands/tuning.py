"""`serin tune`: the serving settings of a model, measured on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from serin.commands.output import Json, progress, show, show_json


def register(app: typer.Typer) -> None:
    app.command()(tune)


def tune(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[str, typer.Option(help="[default: the live one, else the newest]")] = "",
    p99_ms: Annotated[
        float | None, typer.Option(min=0.1, help="The limit. [default: serving.p99_ms of its spec]")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows in one request, as clients send them.")] = 1,
    max_rows: Annotated[
        int | None,
        typer.Option(
            min=1, help="The most that a client sends at once; the batch limit is not moved without it."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=20, help="About how long it may take.")] = 240.0,
    as_json: Json = False,
) -> None:
    """Measure instances, threads, queue delay and batch limit for most requests/s below p99; the next release has them.

    On a Triton of its own: live releases are not touched, but share the machine's cores with it.
    """
    from serin.commands.predictions import open_bundle
    from serin.serving.repository import serving_settings
    from serin.serving.tune import Tuner
    from serin.serving.tune_report import findings, to_json, values, write_report

    bundle = open_bundle(model, version)
    limit = p99_ms or serving_settings(bundle).p99_ms
    tuner = Tuner(
        bundle=bundle,
        p99_ms=limit,
        rows_per_request=rows,
        largest_request_rows=max_rows,
        budget_s=seconds,
        say=progress(),
    )
    tuning = tuner.run()
    settings, plot = write_report(tuning)
    if as_json:
        show_json(to_json(tuning, settings, plot))
        return
    for line in findings(tuning):
        show(line)
    for key, (value, why) in values(tuning).items():
        show(f"  {key}: {value:<8} {why}")
    show(f"settings {settings}")
    show(f"plot     {plot}")
    show(
        f"next: a release of {model} that is started from now on has them, where its spec names none of its own"
    )
