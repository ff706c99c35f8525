"""What is run: every two of a way of starting, what is sent with the run, and a place occur together at least once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WAYS = {
    "run": "`serin run SPEC`",
    "package": "`serin run package:DIGEST`",
    "python": "`Pipeline.run()`",
    "deployment": "`prefect deployment run`",
    "schedule": "a schedule",
}
SENT = {
    "spec": "the spec alone",
    "module": "own module",
    "operator": "own operator",
    "script": "own script",
    "requirements": "requirements",
}
PLACES = {
    "machine": "same machine",
    "host": "host without the disk",
    "slurm": "Slurm",
    "kubernetes": "Kubernetes",
}
WRONG = {"missing": "a spec that does not exist", "unreadable": "a URL or store that cannot be read"}


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `sent`: a key of SENT, or of WRONG for one that must be refused."""

    way: str
    sent: str
    place: str

    @property
    def is_wrong(self) -> bool:
        return self.sent in WRONG

    @property
    def name(self) -> str:
        return f"{self.way} {self.sent}"

    @property
    def model(self) -> str:
        return f"way-{self.way}-{self.sent}"


def covering(first: Sequence[str], second: Sequence[str], third: Sequence[str]) -> list[tuple[str, str, str]]:
    """Rows in which every two values of different lists occur together: all pairs of the first two lists, and the third
    by a Latin square. Its rows beyond the third list have that list's first value. The first two must be as long as
    each other, and the third no longer."""
    assert len(first) == len(second) >= len(third), "the lists do not fit"
    rows = []
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            k = (i + j) % len(first)
            rows.append((one, other, third[k if k < len(third) else 0]))
    return rows


def cases() -> list[Case]:
    """The runs that must complete; then, for every way and place, one that must be refused."""
    right = [Case(*row) for row in covering(list(WAYS), list(SENT), list(PLACES))]
    wrongs = list(WRONG)
    wrong = [
        Case(way, wrongs[(i + j) % len(wrongs)], place)
        for i, way in enumerate(WAYS)
        for j, place in enumerate(PLACES)
    ]
    return [*right, *wrong]
