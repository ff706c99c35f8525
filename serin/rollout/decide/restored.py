"""Decides what a rollout becomes whose processes are all gone, as after a restored backup. Pure."""

from __future__ import annotations

from dataclasses import replace

from serin.rollout.decide.state import Hold, Phase, Rollout, move


def restored(now: Rollout, t: float, reason: str, *, by: str) -> Rollout:
    """Returns the state to resume from.

    A rollout that had decided is completed: nothing of the leaving release is left to wait for. Any other one is held
    before its candidate is loaded, and the live release has all traffic. When a person resumes it, the candidate is
    loaded and verified again, and returns to its step with new evidence.
    """
    match now.phase:
        case Phase.PROMOTED | Phase.ROLLED_BACK | Phase.RETIRED:
            return now
        case Phase.DRAINING:
            return move(now, t, Phase.PROMOTED, f"{now.reason}; {reason}", verdict=now.verdict, by=by)
        case Phase.ABORTING:
            return move(now, t, Phase.ROLLED_BACK, f"{now.reason}; {reason}", verdict=now.verdict, by=by)
        case Phase.RETIRING:
            return move(now, t, Phase.RETIRED, f"{now.reason}; {reason}", verdict=now.verdict, by=by)
        case _:
            return replace(move(now, t, Phase.PENDING, reason, by=by), hold=Hold.PAUSED)
