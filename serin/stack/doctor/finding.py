"""One check of `serin doctor`: what was examined, what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check. `missing` prevents something from working; `note` is worth knowing."""

    what: str
    verdict: Verdict
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
