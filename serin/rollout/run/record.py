"""Converts a rollout's state to and from a decision of its journal."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from serin.errors import FileBroken, NameInvalid
from serin.formats.serving.journal import Decision, prefix_of
from serin.machine.documents import UNFIT
from serin.machine.typed_json import json2value, value2json
from serin.rollout.decide.state import Rollout
from serin.store.numbered import numbered_key

_OF_DECISION: Final = ("phase", "step", "verdict", "reason", "by", "evidence")  # the others are its state


def rollout2decision(rollout: Rollout, t: float, *, command: str | None = None) -> Decision:
    state = value2json(replace(rollout, evidence={}))
    known = {name: state.pop(name) for name in _OF_DECISION}
    return Decision(
        **{**known, "evidence": dict(rollout.evidence)},
        t=t,
        rollout=state.pop("id"),
        weight=rollout.weight_percent,
        command=command,
        state=state,
    )


def decision2rollout(decision: Decision) -> Rollout:
    known = {name: getattr(decision, name) for name in _OF_DECISION}
    return json2value(Rollout, {**decision.state, **known, "id": decision.rollout})


def check_newest(model: str, newest: Decision | None, place: str) -> Decision | None:
    """Returns the newest decision of a model's journal at `place`. Raises FileBroken when it says nothing about its
    rollouts."""
    try:
        of = decision2rollout(newest).model if newest else model
        if of != model:
            raise ValueError(f"it is about {of}")
    except (*UNFIT, NameInvalid) as error:
        key = numbered_key(prefix_of(model), newest.seq if newest else 0)
        problem = f"{type(error).__name__}: {error}"
        raise FileBroken(path=f"{place}/{key}", problem=problem, advice=lost_advice(model)) from error
    return newest


def lost_advice(model: str) -> str:
    return (
        f"restore it from a backup, or move it away and run `serin rollout start {model}:VERSION` with the version "
        "that is to be live"
    )
