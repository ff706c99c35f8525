"""What a person is asked when a rollout waits for approval: the form that Prefect shows."""

from __future__ import annotations

from prefect.input import RunInput


class Approval(RunInput):
    approve: bool = True  # False sends all traffic back and ends the rollout
    why: str = ""  # for the journal
