"""The commands `serin rollout report` and `replay`: a rollout's page, and its log judged again with other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from serin.commands.arguments import ModelVersion
from serin.commands.output import Json, show, show_json, when, write_file
from serin.errors import NotFound
from serin.spec.names import split_version

if TYPE_CHECKING:
    from serin.formats.serving.journal import Decision
    from serin.rollout.decide.plan import Plan
    from serin.rollout.run.replay import Replay

_JUDGED: Final = (
    "quantiles", "margin", "bad_margin", "tolerance_ms", "warmup_s", "false_rollback", "false_promotion",
    "error_tolerance", "max_error_share", "slo_ms", "max_slow_share",
)  # fmt: skip


def report(
    name: ModelVersion,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write. [default: MODEL-rollout.html]", show_default=False),
    ] = None,
) -> None:
    """Write the report of a rollout as one HTML file: evidence over time, both arms' latencies, every decision.
    [default: the newest rollout]"""
    from serin.reports.rollout_page import story2html
    from serin.rollout.run.story import tell

    path = out or Path(f"{split_version(name)[0]}-rollout.html")
    write_file(path, story2html(tell(_decisions(name))))
    show(str(path))


def replay(
    name: ModelVersion,
    spec: Annotated[
        Path | None, typer.Option(help="Judge as this spec says. [default: as then]", show_default=False)
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
    """Judge the stored requests of a rollout again, second by second, perhaps by another spec. Changes
    nothing. [default: the newest rollout]"""
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.replay import replay as judge_again

    rollouts = find_rollouts()
    logs = log or ([rollouts.log] if rollouts.log else [])
    if not logs:
        raise typer.BadParameter(
            "several gateways have the requests: copy gateway/requests.jsonl of each host, and name each with --log"
        )
    decisions = _decisions(name)
    found = judge_again(decisions, logs, _as_in(spec))
    if as_json:
        show_json(_as_json(found))
        return
    _show(found, decisions)


def _as_in(spec: Path | None) -> Callable[[Plan], Plan]:
    """Returns a function that makes a plan judge as a spec says. Its steps stay: the traffic followed them."""
    from serin.rollout.decide.plan import Plan
    from serin.spec.load import load_spec

    if spec is None:
        return lambda plan: plan
    wanted = load_spec(spec)
    other = Plan.from_spec(wanted.rollout, wanted.serving, wanted.objectives)
    return lambda plan: dataclasses.replace(plan, **{each: getattr(other, each) for each in _JUDGED})


def _decisions(name: str) -> list[Decision]:
    """The last rollout of the version that MODEL[:VERSION] names, or the model's newest. A rollout's id is taken as a
    version, too."""
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.record import decision2rollout
    from serin.rollout.run.status import status_of

    rollouts, (model, rollout) = find_rollouts(), split_version(name)
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
