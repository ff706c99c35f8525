"""Rates such as 100/s: how many requests a caller or a model may have, and how many at once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

_RATE = re.compile(r"([1-9][0-9]{0,8})/(s|m|h)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600}
MOST_AT_ONCE = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A token bucket: `count` requests per `period_s` seconds on average, at most `burst` at once."""

    count: int
    period_s: int
    burst: int

    @property
    def wait_s(self) -> int:
        """Returns the seconds, at least one, after which a refused caller has a chance again."""
        return math.ceil(self.period_s / self.count)

    def __str__(self) -> str:
        unit = next(unit for unit, seconds in _UNIT_S.items() if seconds == self.period_s)
        own = f", {self.burst} at once" if self.burst != self.count else ""
        return f"{self.count}/{unit}{own}"


def read_rate(text: str, burst: int | None = None) -> Rate:
    """Reads `100/s`, `600/m` or `50/h`. Without `burst` a whole unit's requests may come at once. ValueError says what
    is wrong."""
    found = _RATE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a valid rate: use a number per s, m or h, such as 100/s or 30/m")
    if burst is not None and not 1 <= burst <= MOST_AT_ONCE:
        raise ValueError(f"{burst} is not a valid burst: use a number of requests from 1 to {MOST_AT_ONCE}")
    count = int(found[1])
    return Rate(count=count, period_s=_UNIT_S[found[2]], burst=count if burst is None else burst)


def _valid(text: str) -> str:
    read_rate(text)
    return text


RateText = Annotated[str, AfterValidator(_valid)]
