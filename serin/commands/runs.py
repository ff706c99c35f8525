"""`serin runs`: what ran and how it ended; its log; how to cancel it; the package it was sent as."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from serin.commands.output import Json, show, show_json, show_table, when, write_file
from serin.errors import NotFound
from serin.machine import environment
from serin.prefect.login import needed_server
from serin.prefect.run_entries import (
    flow_run_details,
    flow_run_entries,
    training_details,
    training_entries,
)

Run = Annotated[str, typer.Argument(help="A run's name, as `serin runs list` shows it.")]
_NEWEST = 20


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="What ran, and how it ended. Without a command: the list.")
    group.callback(invoke_without_command=True)(_list_by_default)
    group.command("list")(list_runs)
    group.command("show")(show_run)
    group.command("logs")(log_of_run)
    group.command("cancel")(cancel)
    group.command("report")(report_run)
    group.command("fetch")(fetch_run)
    app.add_typer(group, name="runs")


def _list_by_default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_runs(limit=_NEWEST, as_json=False)


def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=200, help="Show the newest.")] = _NEWEST,
    as_json: Json = False,
) -> None:
    """Runs of flows and trainings, newest first.

    Flows are those of the stack, or of the Prefect server that PREFECT_API_URL names if no stack is up.
    """
    found = [*flow_run_entries(limit), *training_entries()]
    found = sorted(found, key=lambda entry: entry.began or 0.0, reverse=True)[:limit]
    if as_json:
        show_json([asdict(entry) for entry in found])
        return
    rows = [
        (
            entry.name,
            entry.kind,
            entry.model,
            entry.version,
            entry.state,
            when(entry.began) if entry.began else None,
            None if entry.seconds is None else f"{entry.seconds:.1f}",
        )
        for entry in found
    ]
    show_table(
        ("run", "what", "model", "version", "state", "began", "seconds"),
        rows,
        empty="nothing has run yet; `serin run SPEC`",
    )


def show_run(run: Run, as_json: Json = False) -> None:
    """One run: its state, its parameters and last lines; or a training's metrics, cost and folder."""
    details = flow_run_details(run) or training_details(run)
    if details is None:
        known = [entry.name for entry in (*flow_run_entries(200), *training_entries())]
        raise NotFound(kind="run", name=run, known=known)
    if as_json:
        show_json(details)
        return
    for name, value in details.items():
        if name not in ("log", "stages", "waits"):
            show(f"{name:<12} {value if isinstance(value, str) else json.dumps(value)}")
    for stage in details.get("stages", []):
        show(f"{stage['stage']:<12} {'ran' if stage['ran'] else 'did not run'}: {stage['why']}")
    for wait in details.get("waits", []):
        show(f"{'waited':<12} {wait}")
    for line in details.get("log", []):
        show(f"  {line}")


def log_of_run(
    run: Run,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show new lines until the run has ended.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Show so many of the last lines.")] = 200,
) -> None:
    """The log of a run, oldest line first; of a training, its progress."""
    from serin.prefect.run_control import show_log

    training = training_details(run, lines=lines)
    if training is not None:
        for line in training["log"]:
            show(line)
        return
    show_log(environment.home(), run, show, lines=lines, follow=follow)


def cancel(run: Run) -> None:
    """Cancel a run, with everything that it has started. A training keeps its last checkpoint."""
    from serin.prefect.run_control import cancel_run

    show(f"run {cancel_run(environment.home(), run)!r} is cancelled; `serin run --resume {run}` resumes it")


def report_run(
    run: Annotated[str | None, typer.Argument(help="A run's name. [default: the newest pipeline]")] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="Write report.md and, once there is a version, card.md to this folder."),
    ] = None,
) -> None:
    """A run, its version beside the live one and what its stages left, as one page of Markdown: for a comment, a mail,
    a file."""
    from serin.prefect.run_control import report

    files = report(needed_server(environment.home()).api, run)
    if to is None:
        show(files["report.md"])
        return
    to.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_file(to / name, text)
        show(f"wrote {to / name}")


def fetch_run(
    run: Annotated[str, typer.Argument(help="A run's name, or package:DIGEST.")],
    to: Annotated[
        Path | None, typer.Option(help="The folder to make. [default: the name of the model and the digest]")
    ] = None,
) -> None:
    """Bring the package of a run back: its spec, its code and the files that were sent with it."""
    from serin.pipeline.open_spec import copy_package
    from serin.prefect.run_control import package_of

    reference = package_of(environment.home(), run)
    folder = copy_package(reference, to)
    show(f"{reference} is in {folder}")
    own = folder / "imports"
    show(f"run it as it was: serin run {reference}")
    show(f"run it with your changes: {f'PYTHONPATH={own} ' if own.is_dir() else ''}serin run {folder}")
