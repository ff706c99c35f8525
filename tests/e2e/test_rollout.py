"""Rollouts on real parts under load; all cases are in tests/chaos/rollout.py (`make chaos`)."""

from __future__ import annotations

from tests.chaos.rollout import HUNG, KILLED, first_release, line, play, scene


def test_a_candidate_that_dies_or_hangs_is_rolled_back_at_once_and_no_client_notices() -> None:
    with scene() as stack:
        first_release(stack)
        for case, within_s in ((KILLED, 5.0), (HUNG, 15.0)):
            outcome = play(stack, case)
            print(line(outcome))
            assert (outcome.phase, outcome.live, outcome.errors) == (case.ends, 1, 0), line(outcome)
            assert outcome.seconds < within_s
