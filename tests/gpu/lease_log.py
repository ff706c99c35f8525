"""Watches who holds the GPUs of a home while a test runs, and compares it with the receipts of the stages."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serin.machine.leases import Holder, holders
from serin.store.receipt import Receipt
from tests.kit.threads import beside

LOOK_S = 0.05
PURPOSES = {"etl": "dataset", "train": "training", "export": "export"}
_AROUND_S = 15.0  # a lease begins before its receipt and ends after it, by imports on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The holders between two points of time."""

    before: float
    after: float
    holders: tuple[Holder, ...]


@dataclass(slots=True)
class LeaseLog:
    """`answers`: what `serin gpus --json` answered in the meantime."""

    samples: list[Sample] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def purposes(self) -> set[str]:
        return {holder.purpose for sample in self.samples for holder in sample.holders}

    def shown_purposes(self) -> set[str]:
        """Those that the command has shown."""
        return {
            holder["purpose"]
            for answer in self.answers
            for device in answer["devices"]
            for holder in device["holders"]
        }

    def shown_releases(self) -> list[set[str]]:
        """The releases on all GPUs, for each answer of the command."""
        return [
            {release["release"] for device in answer["devices"] for release in device["releases"]}
            for answer in self.answers
        ]


@contextmanager
def watched_leases(home: Path, ask: Callable[[], dict[str, Any]]) -> Iterator[LeaseLog]:
    """Looks at the leases of `home` every 50 ms, and calls `ask` (the command) again and again, while the block
    runs."""
    log, done, faults = LeaseLog(), threading.Event(), []

    def look() -> None:
        while not done.wait(LOOK_S):
            before, found = time.time(), holders(home)
            log.samples.append(Sample(before=before, after=time.time(), holders=found))

    def ask_again() -> None:
        try:
            while not done.wait(LOOK_S):
                log.answers.append(ask())
        except AssertionError as error:
            faults.append(error)

    with beside(look, ask_again, stop=done):
        yield log
    if faults:
        raise faults[0]


def check_leases(log: LeaseLog, name: str, receipts: Mapping[str, Receipt]) -> list[str]:
    """Raises AssertionError unless each receipt's GPUs were held, for that stage of `name` and by nobody else, during
    all of its time, and no GPU was held by a lease at another time. Returns one line per stage for people."""
    paid = {
        PURPOSES[stage] + f" of {name}": receipt
        for stage, receipt in receipts.items()
        if any(cost.id != "cpu" for cost in receipt.device)
    }
    lines = []
    for purpose, receipt in paid.items():
        ends = receipt.started + receipt.seconds
        during = [s for s in log.samples if s.before > receipt.started and s.after < ends]
        assert during, f"nobody looked while {purpose} ran"
        for sample in during:
            held = {holder.device for holder in sample.holders if holder.purpose == purpose}
            assert held == {cost.id for cost in receipt.device}, f"{purpose}: {sample}"
        held = [s for s in log.samples if any(holder.purpose == purpose for holder in s.holders)]
        early, late = receipt.started - held[0].before, held[-1].after - ends
        assert max(early, late) < _AROUND_S, f"{purpose}: held {early:.1f} s before and {late:.1f} s after"
        lines.append(
            f"{purpose}: {receipt.seconds:.2f} s, {len(during)} looks, held {max(early, 0):.2f} s before "
            f"and {max(late, 0):.2f} s after"
        )
    others = log.purposes() - paid.keys()
    assert not others, f"held without a receipt: {others}"
    return lines
