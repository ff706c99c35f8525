"""Notes what a placed pipeline waits for, by the times of its runs on the server and the receipts of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from serin.machine import environment
from serin.pipeline.stage import waits_before_work
from serin.store.receipt import Receipt
from serin.store.run_waits import note_waits
from serin.store.stage_keys import notes
from serin.store.waits import Wait, between

_ended: dict[str, float] = {}  # when the last stage of a run of this process was seen to have ended


def note_stage_waits(
    stage: str, run: FlowRun, states: Sequence[State[Any]], *, asked: float, noticed: float
) -> None:
    """Notes in this run what it waited for since its last stage, and around the stage that `run` has completed.

    `states`: those of `run`. `asked` and `noticed`: when this run asked for the stage, and heard of its end."""
    own = str(flow_run.id)
    at = {state.type: state.timestamp.timestamp() for state in reversed(states)}
    found = between(
        ("", asked),
        (f"Prefect gave {stage} to a worker", at.get(StateType.PENDING)),
        (f"start of the process for {stage}", at.get(StateType.RUNNING)),
    )
    receipt = _receipt_of(stage, own, since=at.get(StateType.RUNNING, asked))
    if receipt is not None:
        before = sum(wait.seconds for wait in receipt.waits if wait.what in waits_before_work(stage))
        found += between(
            ("", at.get(StateType.RUNNING)), (f"preparation of {stage}", receipt.started - before)
        )
    done = None if receipt is None else receipt.started + receipt.seconds
    ended = run.end_time.timestamp() if run.end_time else None
    found += between(
        ("", done), (f"report of {stage} and end of its run", ended), (f"news of the end of {stage}", noticed)
    )
    note_waits(environment.home(), own, [*_since_the_last(own, asked), *found])
    _ended[own] = noticed


def _receipt_of(stage: str, run: str, *, since: float) -> Receipt | None:
    """The receipt that the stage has left on this host, unless it is one of an earlier run."""
    home = environment.home()
    files = [
        entry["receipt"] for entry in notes(home, run) if entry["stage"] == stage and entry.get("receipt")
    ]
    receipt = Receipt.load_file(home / files[0]) if files else None
    return receipt if receipt is not None and receipt.started >= since else None


def _since_the_last(run: str, asked: float) -> list[Wait]:
    """What the pipeline itself took before it asked for the stage."""
    if run in _ended:
        return between(("", _ended[run]), ("pipeline between two stages", asked))
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return []
    wanted, began = context.flow_run.expected_start_time, context.start_time.timestamp()
    return between(
        ("", wanted.timestamp() if wanted else None),
        ("start of the process for the pipeline", began),
        ("pipeline before its first stage", asked),
    )
