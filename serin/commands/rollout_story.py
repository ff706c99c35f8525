"""The commands `serin rollout report` and `replay`: a rollout's page, and its log judged again with other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.output import Json, show, show_json, when, write_file
from serin.errors import NotFound

if TYPE_CHECKING:
    from serin.formats.serving.journal import Decision
    from serin.rollout.decide.plan import Plan
    from serin.rollout.run.replay import Replay

Model = Annotated[str, typer.Argument(help="The model's name.")]
Which = Annotated[
    str | None,
    typer.Option(
        "--rollout",
        metavar="VERSION|ID",
        help="The last rollout of this version. [default: the newest rollout]",
        show_default=False,
    ),
]


def report(
    model: Model,
    rollout: Which = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write. [default: MODEL-rollout.html]", show_default=False),
    ] = None,
) -> None:
    """Write the report of a rollout as one HTML file: evidence over time, both arms' latencies, every decision."""
    from serin.reports.rollout_page import story2html
    from serin.rollout.run.story import tell

    path = out or Path(f"{model}-rollout.html")
    write_file(path, story2html(tell(_decisions(model, rollout))))
    show(str(path))


def replay(
    model: Model,
    rollout: Which = None,
    margin: Annotated[
        float | None,
        typer.Option(help="Judge with this latency margin.", min=0, show_default=False),
    ] = None,
    tolerance_ms: Annotated[
        float | None,
        typer.Option(help="Judge with this latency tolerance in milliseconds.", min=0, show_default=False),
    ] = None,
    false_rollback: Annotated[
        float | None,
        typer.Option(
            help="Judge with this probability of a false rollback.", min=1e-9, max=0.5, show_default=False
        ),
    ] = None,
    error_tolerance: Annotated[
        float | None,
        typer.Option(help="Judge with failures allowed this many times as often.", min=1, show_default=False),
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(
            "--log",
            help="Other request logs; repeat it for those of several gateways. [default: the gateway's]",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge the stored requests of a rollout again, second by second, with other settings. Changes nothing."""
    from serin.pipeline.rollouts import find_rollouts
    from serin.rollout.run.replay import replay as judge_again

    rollouts = find_rollouts()
    logs = log or ([rollouts.log] if rollouts.log else [])
    if not logs:
        raise typer.BadParameter(
            "several gateways have the requests: copy gateway/requests.jsonl of each host, and name each with --log"
        )
    decisions = _decisions(model, rollout)
    change = _changed(margin, tolerance_ms, false_rollback, error_tolerance)
    found = judge_again(decisions, logs, change)
    if as_json:
        show_json(_as_json(found))
        return
    _show(found, decisions)


def _changed(
    margin: float | None,
    tolerance_ms: float | None,
    false_rollback: float | None,
    error_tolerance: float | None,
) -> Callable[[Plan], Plan]:
    changes: dict[str, float] = {}
    if margin is not None:
        changes |= {"margin": margin, "bad_margin": 2 * margin}
    if tolerance_ms is not None:
        changes["tolerance_ms"] = tolerance_ms
    if false_rollback is not None:
        changes["false_rollback"] = false_rollback
    if error_tolerance is not None:
        changes["error_tolerance"] = error_tolerance
    return lambda plan: dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def _decisions(model: str, rollout: str | None) -> list[Decision]:
    from serin.pipeline.rollouts import find_rollouts
    from serin.rollout.run.record import decision2rollout
    from serin.rollout.run.status import status_of

    rollouts = find_rollouts()
    now = status_of(rollouts, model)
    if now is None:
        raise NotFound(kind="rollout of", name=model, known=[])
    if rollout is None:
        return rollouts.decisions(model, now.rollout.id)
    by_version = {}  # the last of each
    for decision in (every := rollouts.decisions(model)):
        by_version[decision2rollout(decision).candidate.version] = decision.rollout
    wanted = by_version.get(int(rollout), rollout) if rollout.isdecimal() else rollout
    decisions = [decision for decision in every if decision.rollout == wanted]
    if not decisions:
        known = [str(version) for version in sorted(by_version)]
        raise NotFound(kind=f"rollout of {model!r}:", name=rollout, known=known)
    return decisions


def _show(found: Replay, decisions: list[Decision]) -> None:
    if not found.requests:
        show("the request log has no more requests of this rollout")
        return
    last, failed = found.moments[-1], found.failed
    turned = next((decision for decision in decisions if decision.phase == "aborting"), None)
    show(f"judged again: {found.requests} requests, {len(found.moments)} s")
    show(
        f"then:  {f'rolled back at {when(turned.t)}: {turned.reason}' if turned else f'ended {decisions[-1].phase}'}"
    )
    if failed:
        show(f"now:   rolled back at {when(failed.point.t)}: {failed.reason}")
    else:
        show(f"now:   not rolled back; at the end {last.verdict}: {last.reason}")


def _as_json(found: Replay) -> dict[str, object]:
    rows = [
        {
            "t": moment.point.t,
            "weight_percent": moment.point.weight_percent,
            "evidence": moment.point.total,
            "guards": dict(moment.point.e_values),
            "verdict": moment.verdict.value,
            "reason": moment.reason,
        }
        for moment in found.moments
    ]
    failed = found.failed
    return {"requests": found.requests, "failed_at": failed.point.t if failed else None, "seconds": rows}
