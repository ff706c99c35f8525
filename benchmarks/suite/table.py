"""The table of a suite: part, result, seconds, figures and their goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.suite.parts import Outcome, Part

_HEADER = f"{'part':<26}{'result':<13}{'seconds':>8}  ratio and goal"


def show_line(outcome: Outcome, part: Part) -> str:
    """One part in a line; one that failed with its last output below."""
    line = f"{outcome.name:<26}{outcome.result:<13}{outcome.seconds:>8.1f}  {_figures(outcome, part)}"
    if outcome.is_disturbed:
        line += f"; the host took {outcome.stolen:.0%} of the CPU time"
    first, _, rest = outcome.detail.partition("\n")
    if outcome.result in ("passed", "skipped", "goal missed", "not run"):
        return f"{line}{first}".rstrip()
    return "\n".join([f"{line}{first}".rstrip(), *(f"    {text}" for text in rest.splitlines())])


def show_table(outcomes: Sequence[Outcome], parts: Mapping[str, Part]) -> str:
    """All parts, one line each."""
    lines = [show_line(outcome, parts[outcome.name]).splitlines()[0] for outcome in outcomes]
    return "\n".join([_HEADER, "-" * len(_HEADER), *lines, ""])


def show_goals(outcomes: Sequence[Outcome], parts: Mapping[str, Part]) -> str:
    """How many goals are met, and those that are missed or have no figure."""
    judged = [
        (f"{outcome.name} {name}", outcome.figures.get(name), goal)
        for outcome in outcomes
        for name, goal in parts[outcome.name].goals.items()
    ]
    met = sum(value is not None and goal.is_met(value) for _, value, goal in judged)
    lines = [f"{met} of {len(judged)} goals met"]
    lines += [
        f"missed: {name} {value:.3g} (goal {goal})"
        for name, value, goal in judged
        if value is not None and not goal.is_met(value)
    ]
    lines += [f"no figure: {name} (goal {goal})" for name, value, goal in judged if value is None]
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
