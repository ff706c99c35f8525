"""Renders a rollout as one HTML page: outcome, evidence, latencies and decisions. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Final

from serin.formats.serving.journal import NOT_PROMISED, Decision
from serin.reports.page import html_page
from serin.reports.rollout_charts import RolloutStory, evidence_drawing, latency_drawing, proof_drawing
from serin.reports.rollout_shadow import shadow_section
from serin.reports.svg import Drawing

_AGAINST_NOTE: Final = (
    "Each line is the wealth of a bet against the candidate: it starts at 1 and shrinks while the candidate does well. "
    "The shaded bands show the candidate's share of traffic."
)
_FOR_NOTE: Final = (
    "The wealth of bets that the candidate is not slower. Each must reach the threshold before the candidate gets all "
    "traffic."
)
_LATENCY_NOTE: Final = (
    "All requests that were judged. The bars are 95% intervals of each quantile for independent requests. They are an "
    "illustration: no decision depends on them."
)
_ENDS: Final = {
    "promoted": ("good", "promoted"),
    "rolled_back": ("bad", "rolled back"),
    "retired": ("", "retired"),
}


def story2html(story: RolloutStory) -> str:
    held = f", held ({story.hold})" if story.hold else ""
    kind, word = _ENDS.get(story.phase, ("", f"{story.phase}{held}"))
    return html_page(
        f"{story.candidate} against {story.stable}",
        f'<p class="lead"><span class="{kind}">{escape(word)}</span>: {escape(story.reason)}</p>{_rules(story)}'
        + (shadow_section(story.shadow) if story.shadow else "")
        + _chart("Evidence against the candidate", evidence_drawing(story), _AGAINST_NOTE)
        + _chart("Evidence for the candidate", proof_drawing(story), _FOR_NOTE)
        + _chart("Latency of both arms", latency_drawing(story), _LATENCY_NOTE)
        + f"<h2>Decisions</h2>{_table(story)}",
    )


def _rules(story: RolloutStory) -> str:
    rules = story.rules
    steps = ", ".join([*(["shadow"] if rules.shadow else []), *(f"{step:g}%" for step in rules.steps)])
    return (
        f"<p>{escape(_sentence(story.began_because))}</p>"
        f'<p class="note">{_time(story.began)} to {_time(story.ended) if story.ended else "now"} UTC. Steps: {steps}. '
        f"A candidate within the allowed limits is rolled back with a probability of at most {rules.false_rollback:g} "
        f"({NOT_PROMISED}). "
        f"Allowed: slower by {escape(rules.allowed)}; latencies of the first {rules.warmup_s:g} s with traffic are not "
        f"compared. Compared with: {escape(story.control)}.</p>"
    )


def _chart(title: str, drawing: Drawing | None, note: str) -> str:
    shown = drawing.embedded(title) if drawing else "<p>Nothing was measured.</p>"
    return f'<h2>{escape(title)}</h2><section>{shown}<p class="note">{escape(note)}</p></section>'


def _table(story: RolloutStory) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("UTC", "phase", "traffic", "verdict", "reason", "by"))
    return f"<table><tr>{head}</tr>{''.join(map(_row, story.decisions))}</table>"


def _row(decision: Decision) -> str:
    hold = decision.state.get("hold")
    cells = (
        _time(decision.t)[11:],
        f"{decision.phase}, held: {hold}" if hold else decision.phase,
        f"{decision.weight:g}%",
        decision.verdict or "",
        decision.reason,
        decision.by,
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _time(t: float) -> str:
    return f"{datetime.fromtimestamp(t, UTC):%Y-%m-%d %H:%M:%S}"
