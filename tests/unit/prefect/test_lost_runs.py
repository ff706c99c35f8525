"""What becomes of a run whose process is gone, as a table."""

from dataclasses import replace

import pytest

from serin.prefect.reconcile import (
    GRACE_S,
    REQUEUES,
    STARTING_S,
    Fate,
    Past,
    Run,
    judge,
    not_queued_again,
    queued_again,
    times_queued_again,
    was_being_cancelled,
    was_preempted,
)

RUN = Run(id="1", name="calm-owl", pool="cpu", state="RUNNING", since=1000.0)
TERMINATED = "Execution was cancelled by the runtime environment."
STOPPED = replace(RUN, state="CRASHED", message=TERMINATED)
ASKED_FOR = Past(type="SCHEDULED", name="Scheduled")
TAKEN = Past(type="PENDING", name="Pending")
AGAIN = Past(type="SCHEDULED", name="AwaitingRetry", message=queued_again(1, "its worker is gone"))
RESUMED = Past(type="SCHEDULED", name="AwaitingRetry", message="resumed by ada")
RUNS = Past(type="RUNNING", name="Running")
CANCELLING = Past(type="CANCELLING", name="Cancelling")
ENDED = Past(type="CRASHED", name="Crashed", message=TERMINATED)
LATE = Past(type="SCHEDULED", name="Late")


@pytest.mark.parametrize(
    ("state", "missing_s", "fate"),
    [
        ("RUNNING", 0.0, Fate.LEAVE),
        ("RUNNING", GRACE_S - 0.1, Fate.LEAVE),
        ("RUNNING", GRACE_S, Fate.CRASHED),
        ("PAUSED", GRACE_S, Fate.CRASHED),
        ("CANCELLING", GRACE_S, Fate.CANCELLED),
        ("SCHEDULED", 1e6, Fate.LEAVE),
        ("COMPLETED", 1e6, Fate.LEAVE),
    ],
)
def test_a_run_without_a_process_ends_as_its_state_says(state: str, missing_s: float, fate: Fate) -> None:
    assert judge(replace(RUN, state=state), missing_s=missing_s, worker_since=500.0) is fate


def test_a_run_that_was_suspended_needs_no_process() -> None:
    assert judge(replace(RUN, state="PAUSED", suspended=True), missing_s=1e6, worker_since=None) is Fate.LEAVE


@pytest.mark.parametrize(
    ("worker_since", "missing_s", "fate"),
    [
        (500.0, GRACE_S, Fate.LEAVE),  # the worker that took it lives, and a process takes its time
        (500.0, STARTING_S, Fate.REQUEUE),
        (1500.0, GRACE_S, Fate.REQUEUE),  # the worker that lives began later
        (1500.0, GRACE_S - 0.1, Fate.LEAVE),
        (None, 1e6, Fate.LEAVE),  # nobody is there who could start it
    ],
)
def test_a_run_that_was_taken_and_not_started_is_queued_again_when_its_worker_is_gone(
    worker_since: float | None, missing_s: float, fate: Fate
) -> None:
    assert judge(replace(RUN, state="PENDING"), missing_s=missing_s, worker_since=worker_since) is fate


@pytest.mark.parametrize(
    "message", [TERMINATED, "Flow run infrastructure exited with non-zero status code -15. Terminated."]
)
def test_what_was_asked_to_stop_in_the_time_of_this_stack_is_preempted(message: str) -> None:
    assert was_preempted(replace(STOPPED, message=message), stack_since=900.0)


@pytest.mark.parametrize(
    "run",
    [
        replace(STOPPED, since=899.0),  # by `serin down`
        replace(STOPPED, placed=True),
        replace(STOPPED, state="FAILED"),
        replace(STOPPED, message="its process is gone; `serin run --resume` resumes it"),
        replace(STOPPED, message="Flow run process exited with non-zero status code -9."),
    ],
)
def test_what_ended_otherwise_is_not_queued_again(run: Run) -> None:
    assert not was_preempted(run, stack_since=900.0)


@pytest.mark.parametrize(
    ("history", "times"),
    [
        ([ASKED_FOR, TAKEN], 0),
        ([ASKED_FOR, TAKEN, AGAIN, TAKEN], 1),
        ([ASKED_FOR, TAKEN, AGAIN, LATE, TAKEN, AGAIN, TAKEN], 2),  # waiting is nobody's wish
        ([ASKED_FOR, TAKEN, AGAIN, TAKEN, AGAIN, TAKEN, RESUMED, TAKEN], 0),
        ([ASKED_FOR, TAKEN, AGAIN, TAKEN, RESUMED, TAKEN, AGAIN, TAKEN], 1),
    ],
)
def test_what_was_queued_again_is_counted_since_somebody_asked_for_it(
    history: list[Past], times: int
) -> None:
    assert times_queued_again(history) == times


def test_a_run_that_is_not_queued_again_says_why_and_what_to_do() -> None:
    never = not_queued_again(replace(RUN, state="PENDING"))
    assert never.startswith(f"not queued again after {REQUEUES} times: no process of it ever started")
    assert "worker-cpu" in never
    assert "serin run --resume" in never
    assert "asked to stop each time" in not_queued_again(STOPPED)
    assert not was_preempted(replace(STOPPED, message=not_queued_again(STOPPED)), stack_since=900.0)


@pytest.mark.parametrize(
    ("history", "cancelled"),
    [
        ([ASKED_FOR, TAKEN, RUNS, CANCELLING, ENDED], True),
        ([ASKED_FOR, TAKEN, RUNS, CANCELLING, ENDED, RESUMED, LATE, TAKEN, RUNS, ENDED], False),
        ([ASKED_FOR, TAKEN, RUNS, ENDED], False),
        ([], False),
    ],
)
def test_a_run_was_being_cancelled_when_somebody_cancelled_it_since_it_was_queued(
    history: list[Past], cancelled: bool
) -> None:
    assert was_being_cancelled(history) is cancelled
