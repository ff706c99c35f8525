"""A rollout's story as one HTML file that needs nothing beside itself: no script, no font, no network. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Final

from serin.formats.serving.journal import Decision
from serin.reports.rollout_charts import (
    ALARM,
    GOOD,
    INK,
    RolloutStory,
    evidence_drawing,
    latency_drawing,
    proof_drawing,
)

_STYLE: Final = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: {INK}; max-width: 980px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: 0; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
svg {{ width: 100%; height: auto; font: 11px system-ui, sans-serif; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
td, th {{ text-align: left; vertical-align: top; padding: 4px 10px 4px 0; border-bottom: 1px solid #d8dde3; }}
.lead {{ font-size: 1.05rem; }}
.bad {{ color: {ALARM}; font-weight: bold; }} .good {{ color: {GOOD}; font-weight: bold; }}
.note {{ color: #5b6570; font-size: 13px; }}
"""
_LATENCY_NOTE: Final = (
    "All requests that were judged. The bars show between what each quantile lies, at 95% if requests were "
    "independent of each other: they are for the eye, and nothing is decided by them."
)
_ENDS: Final = {"promoted": ("good", "promoted"), "rolled_back": ("bad", "rolled back")}


def story2html(story: RolloutStory) -> str:
    kind, word = _ENDS.get(
        story.phase, ("", f"{story.phase}{f', held ({story.hold})' if story.hold else ''}")
    )
    title = f"{story.candidate} against {story.stable}"
    return "".join(
        (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
            f'<p class="lead"><span class="{kind}">{escape(word)}</span>: {escape(story.reason)}</p>',
            f'<p class="note">{_time(story.began)} to {_time(story.ended) if story.ended else "now"} UTC; steps ',
            f"{escape(', '.join(f'{step:g}%' for step in story.rules.steps))}; a candidate no worse than allowed is ",
            f"rolled back with a chance of at most {story.rules.false_rollback:g}. Allowed: slower by ",
            f"{escape(story.rules.allowed)}; latencies of its first {story.rules.warmup_s:g} s with traffic are not ",
            f"compared. Held against: {escape(story.control)}.</p>",
            _section(
                "Evidence against the candidate",
                evidence_drawing(story),
                "Each line is what bets against the candidate have become: 1 at the start, less while it does well.",
            ),
            _section(
                "Evidence for the candidate",
                proof_drawing(story),
                "What bets that it is not slower have become. To get all traffic it needs enough of each.",
            ),
            _section("Latency of both arms", latency_drawing(story), _LATENCY_NOTE),
            f"<h2>Decisions</h2>{_table(story)}</body></html>",
        )
    )


def _section(title: str, drawing: str, note: str) -> str:
    shown = drawing or "<p>Nothing was measured.</p>"
    return f'<h2>{escape(title)}</h2>{shown}<p class="note">{escape(note)}</p>'


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


def _time(t: float) -> str:
    return f"{datetime.fromtimestamp(t, UTC):%Y-%m-%d %H:%M:%S}"
