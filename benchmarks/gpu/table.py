"""The table of `make gpu-test`: part, result, seconds, figures and their goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.parts import Outcome, Part

_HEADER = f"{'part':<26}{'result':<13}{'seconds':>8}  ratio and goal"


def show_line(outcome: Outcome, part: Part) -> str:
    """One part in a line; one that failed with its last output below."""
    line = f"{outcome.name:<26}{outcome.result:<13}{outcome.seconds:>8.1f}  {_figures(outcome, part)}"
    first, _, rest = outcome.detail.partition("\n")
    if outcome.result in ("passed", "skipped", "goal missed", "not run"):
        return f"{line}{first}".rstrip()
    return "\n".join([f"{line}{first}".rstrip(), *(f"    {text}" for text in rest.splitlines())])


def show_table(
    outcomes: Sequence[Outcome],
    parts: Mapping[str, Part],
    facts: Mapping[str, Any],
    versions: Mapping[str, Any],
) -> str:
    """All parts, and under which versions they ran."""
    lines = [_HEADER, "-" * len(_HEADER)]
    for outcome in outcomes:
        first = show_line(outcome, parts[outcome.name]).splitlines()[0]
        lines.append(first)
    known = " ".join(f"{name}={value}" for name, value in versions.items() if isinstance(value, str))
    triton = " ".join(f"{name}={value}" for name, value in (versions.get("triton") or {}).items())
    lines += [
        "",
        f"{facts['date']}, commit {facts['commit'] or 'unknown'}, {', '.join(versions['gpu']) or 'no GPU'}",
        known,
        f"Triton's environment: {triton or 'not found'}",
    ]
    return "\n".join(lines)


def _figures(outcome: Outcome, part: Part) -> str:
    """Figures that have a goal, and the others after them."""
    judged = [
        f"{name} {outcome.figures[name]:.3g} ({goal}{'' if goal.is_met(outcome.figures[name]) else ', missed'})"
        for name, goal in part.goals.items()
        if name in outcome.figures
    ]
    others = [f"{name} {value:.3g}" for name, value in outcome.figures.items() if name not in part.goals]
    return ", ".join([*judged, *others])
