"""How the console writes times, durations, shares and sizes for people."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from markupsafe import Markup, escape

from serin.machine.hardware import human_bytes
from serin.reports.charts import number


def moment(t: float | None) -> Markup:
    """Returns a time as an element that the page's script turns into the reader's time zone."""
    if t is None:
        return Markup("-")
    when = datetime.fromtimestamp(t, UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        when.isoformat(timespec="seconds"), f"{when:%Y-%m-%d %H:%M:%S} UTC"
    )


def ago(t: float | None) -> str:
    """Returns how long ago something was."""
    return "-" if t is None else f"{duration(max(time.time() - t, 0.0))} ago"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == int(seconds) else f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.3g} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"


def ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g} ms" if math.isfinite(value) else "more"


def percent(share: float | None) -> str:
    """Returns a share between 0 and 1 as a percentage; a small one keeps its digits."""
    if share is None:
        return "-"
    return f"{100 * share:.3g}%" if share == 0 or share >= 0.01 else f"{share * 100:.2g}%"


def share(value: float) -> str:
    """Returns a promised share without rounding, such as 99.95%."""
    return f"{100 * value:.6g}%"


def marked(text: str) -> Markup:
    """Returns text in which commands and keys are between backquotes, with these as code."""
    pieces = str(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if place % 2 else escape(piece)
        for place, piece in enumerate(pieces)
    )


def size(count: float | None) -> str:
    return "-" if count is None else human_bytes(count)


def short(run: str) -> str:
    """Returns a run's name with the beginning of its digest only."""
    return _DIGEST.sub(lambda found: found[0][:_SHOWN_OF_DIGEST], run)


def figure(value: float | None) -> str:
    return "-" if value is None else number(value)


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


_SHOWN_OF_DIGEST: Final = 8
_DIGEST: Final = re.compile(r"\b[0-9a-f]{12,}\b")
FILTERS: Final[dict[str, Callable[[Any], Any]]] = {
    "moment": moment, "ago": ago, "duration": duration, "ms": ms, "percent": percent, "share": share, "size": size,
    "figure": figure, "count": count, "marked": marked, "short": short,
}  # fmt: skip
