"""Rollouts on real parts under load; all cases are in tests/chaos/rollout.py (`make chaos`)."""

from __future__ import annotations

from tests.chaos.rollout import HUNG, KILLED, line, play
from tests.chaos.stage import PLAN, stage


def test_a_candidate_that_dies_or_hangs_is_rolled_back_at_once_and_no_client_notices() -> None:
    with stage() as scene:
        scene.first_release()
        for case in (KILLED, HUNG):
            outcome = play(scene, case)
            print(line(outcome))
            assert (outcome.phase, outcome.live, outcome.errors) == (case.ends, 1, ()), line(outcome)
            assert outcome.seconds < PLAN.deadline_s / 4, "a step's deadline had no part in it"
