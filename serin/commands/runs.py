"""What ran: Prefect's runs while the stack is up, and the trainings in this home's run folders."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serin.commands.output import Json, show, show_json, show_table, when
from serin.errors import NotFound
from serin.machine import environment
from serin.stack.prefect.login import stack_api

if TYPE_CHECKING:
    from serin.stack.host.state import Stack

Run = Annotated[str, typer.Argument(help="A run's name, as `serin runs list` shows it.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    name: str
    kind: str
    state: str
    began: float | None
    seconds: float | None


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="What ran, and how it ended.", no_args_is_help=True)
    group.command("list")(list_runs)
    group.command("show")(show_run)
    group.command("report")(report_run)
    app.add_typer(group, name="runs")


def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=200, help="Show the newest.")] = 20, as_json: Json = False
) -> None:
    """Runs of flows (while the stack is up) and trainings, newest first."""
    found = [*_flow_runs(limit), *_trainings()]
    found = sorted(found, key=lambda entry: entry.began or 0.0, reverse=True)[:limit]
    if as_json:
        show_json([asdict(entry) for entry in found])
        return
    rows = [
        (
            entry.name,
            entry.kind,
            entry.state,
            when(entry.began) if entry.began else None,
            _seconds(entry.seconds),
        )
        for entry in found
    ]
    show_table(
        ("run", "what", "state", "began", "seconds"), rows, empty="nothing has run yet; `serin run SPEC`"
    )


def show_run(run: Run, as_json: Json = False) -> None:
    """One run: its state, its parameters and last lines; or a training's metrics, cost and folder."""
    details = _flow_run_details(run) or _training_details(run)
    if details is None:
        known = [entry.name for entry in [*_flow_runs(200), *_trainings()]]
        raise NotFound(kind="run", name=run, known=known)
    if as_json:
        show_json(details)
        return
    for name, value in details.items():
        if name not in ("log", "stages"):
            show(f"{name:<12} {value if isinstance(value, str) else json.dumps(value)}")
    for stage in details.get("stages", []):
        show(f"{stage['stage']:<12} {'ran' if stage['ran'] else 'did not run'}: {stage['why']}")
    for line in details.get("log", []):
        show(f"  {line}")


def report_run(
    run: Annotated[str | None, typer.Argument(help="A run's name. [default: the newest pipeline]")] = None,
    pictures: Annotated[bool, typer.Option("--pictures", help="With pictures, as data URLs.")] = False,
) -> None:
    """A run and what its stages left, as one page of Markdown: for a comment, a mail, a file."""
    from serin.errors import NotUp
    from serin.stack.prefect.run_report import report

    stack = _stack()
    if stack is None:
        raise NotUp(home=environment.home())
    show(report(stack_api(stack), run, pictures=pictures))


def _stack() -> Stack | None:
    """The one that runs here, with its own Prefect server or another."""
    from serin.stack.host.state import read_stack

    stack = read_stack(environment.home())
    return stack if stack is not None and stack.is_alive else None


def _flow_runs(limit: int) -> list[RunEntry]:
    from serin.stack.prefect.processes import POOLS
    from serin.stack.prefect.rest_api import flow_names, flow_runs

    stack = _stack()
    if stack is None:
        return []
    api, pools = stack_api(stack), () if stack.owns_prefect else POOLS  # others may use it for other things
    names = flow_names(api)
    return [
        RunEntry(
            name=run["name"],
            kind=names.get(run["flow_id"], "flow"),
            state=str(run["state_name"]).lower(),
            began=_timestamp(run.get("start_time") or run.get("created")),
            seconds=run.get("estimated_run_time"),
        )
        for run in flow_runs(api, limit=limit, pools=pools)
    ]


def _flow_run_details(name: str) -> dict[str, Any] | None:
    from serin.stack.prefect.rest_api import flow_names, flow_runs, run_log
    from serin.store.stage_keys import notes

    stack = _stack()
    found = flow_runs(stack_api(stack), limit=1, name=name) if stack else []
    if stack is None or not found:
        return None
    api, run = stack_api(stack), found[0]
    return {
        "run": run["name"],
        "id": run["id"],
        "flow": flow_names(api).get(run["flow_id"], "?"),
        "state": run["state_name"],
        "message": (run.get("state") or {}).get("message") or "",
        "began": run.get("start_time") or "",
        "seconds": run.get("estimated_run_time"),
        "parameters": run["parameters"],
        "stages": notes(environment.home(), run["id"]),
        "log": run_log(api, run["id"]),
    }


def _trainings() -> list[RunEntry]:
    from serin.store.runs import runs

    found = []
    for name in runs(environment.home()):
        folder = environment.home() / "runs" / name
        receipt = _read(folder / "receipt.json")
        file = folder / "training.json"
        found.append(
            RunEntry(
                name=name,
                kind="search" if name.startswith("search-") else "training",
                state=_training_state(folder),
                began=receipt.get("started") or (file.stat().st_mtime if file.exists() else None),
                seconds=receipt.get("seconds"),
            )
        )
    return found


def _training_details(name: str) -> dict[str, Any] | None:
    from serin.store.runs import runs

    if name not in runs(environment.home()):
        return None
    folder = environment.home() / "runs" / name
    return {
        "run": name,
        "state": _training_state(folder),
        "folder": str(folder),
        "metrics": _read(folder / "result" / "metrics.json").get("metrics", {}),
        "receipt": _read(folder / "receipt.json"),
        "log": _last_lines(folder / "progress.jsonl"),
    }


def _training_state(folder: Path) -> str:
    from serin.training.launch.status import read_status

    if (folder / "result").is_dir() or (folder / "result.json").is_file():  # the latter is a search's
        return "done"
    status = read_status(folder)
    return status.state if status else "unfinished"


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _last_lines(path: Path) -> list[str]:
    from serin.training.launch.progress import describe

    if not path.exists():
        return []
    found = [describe(json.loads(line)) for line in path.read_text().splitlines()]
    return [line for line in found if line][-20:]


def _timestamp(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"
