"""A live view of a rollout on a terminal: traffic shares, evidence, and the latency of both arms.

What it shows beyond the journal is computed from the gateways' evidence and the newest decision, exactly as the
controller does. It writes nothing.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from serin.cluster.judge import JudgeOfNow
from serin.commands.output import when
from serin.evidence.histogram import bands_us, latency_name, quantiles_us
from serin.formats.serving.journal import Decision
from serin.reports.rollout_page import EvidencePoint, ShadowStory
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.sentences import percent
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.access import Rollouts
from serin.rollout.run.ports import Judge
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.story import point, shadow_story, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

_EVERY_S: Final = 0.5
_BAR: Final = 30
_DECISIONS: Final = 6
_SEGMENTS: Final = 12
_COLOURS: Final = {Phase.PROMOTED: "green", Phase.ROLLED_BACK: "red", Phase.ABORTING: "red"}


def watch_live(rollouts: Rollouts, model: str, rollout: str, console: Console) -> None:
    """Shows the view until the rollout has ended."""
    judge, read = JudgeOfNow(rollouts.objects), rollouts.reader(model, rollout)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            decisions = read()
            live.update(frame(decisions, judge, time.time()), refresh=True)
            if Phase(decisions[-1].phase).final:
                return
            time.sleep(_EVERY_S)


def frame(decisions: Sequence[Decision], judge: Judge, t: float) -> RenderableType:
    now = decision2rollout(decisions[-1])
    evidence, reason = Evidence.from_json(now.evidence.get("guards", {})), now.reason
    if now.phase in (Phase.SHIFTING, Phase.BAKING):
        found = judge.judge(now, t)
        evidence = Evidence.from_json(found.evidence.get("guards", {}))
        reason = reason if now.hold else found.reason
    parts: list[RenderableType] = [_head(now, t), Text(reason)]
    if now.phase is Phase.SHADOWING and (shadow := shadow_story(now)):
        parts += [Text(), *(Text(line) for line in shadow.lines), Text(), _segments(shadow)]
    if evidence.blocks:
        parts += [Text(), _evidence(now, point(now, evidence, t)), Text(), _arms(now, evidence)]
    parts += [Text(), _story(tell(decisions).decisions)]
    return Panel(Group(*parts), title=f"rollout of {now.candidate.name}", title_align="left")


def _head(now: Rollout, t: float) -> RenderableType:
    filled, control = (round(_BAR * share / 100) for share in (now.weight_percent, now.baseline_percent))
    line = Text()
    line.append(f"{now.phase}".replace("_", " ").ljust(12), style=f"bold {_COLOURS.get(now.phase, 'cyan')}")
    line.append("█" * filled, style="yellow")
    line.append("█" * control, style="cyan")
    line.append("█" * (_BAR - filled - control), style="blue")
    rest = 100 - now.weight_percent - now.baseline_percent
    line.append(f"  {now.candidate.name} {now.weight_percent:g}%")
    if now.baseline_percent:
        line.append(f", its control {now.baseline_percent:g}%")
    line.append(f", {now.stable.name if now.stable else 'nothing'} {rest:g}%")
    line.append(f"   for {max(t - now.since, 0):.0f} s")
    if now.hold:
        line.append(f"   held: {now.hold}", style="bold red")
    return line


def _evidence(now: Rollout, seen: EvidencePoint) -> RenderableType:
    """Draws bars on a logarithmic scale; full is enough. The shares say how often chance shows as much."""
    plan = now.plan
    table = Table("against the candidate", "", "by chance in", "rolled back at", box=None, pad_edge=False)
    rows = [("all together", seen.total), *seen.e_values.items()]
    for name, e_value in rows:
        style = "bold" if name == "all together" else ""
        bar = _bar(e_value, plan.rollback_at, "red")
        risk = f"{percent(plan.rollback_risk(e_value))} of rollouts"
        table.add_row(Text(name, style=style), bar, risk, percent(plan.false_rollback))
    for name, e_value in seen.proofs.items():
        bar = _bar(e_value, plan.promote_at, "green")
        risk = f"{percent(plan.promotion_risk(e_value))} of rollouts"
        table.add_row(Text(f"for it: {name}"), bar, risk, f"enough at {percent(plan.false_promotion)}")
    return table


def _bar(e_value: float, enough: float, colour: str) -> Text:
    share = min(max(math.log(max(e_value, 1e-300)) / math.log(enough), 0.0), 1.0)
    filled = round(_BAR * share)
    return Text("━" * filled, style=colour).append("─" * (_BAR - filled), style="dim")


def _arms(now: Rollout, evidence: Evidence) -> RenderableType:
    names = [latency_name(quantile) for quantile in now.plan.quantiles]
    table = Table("arm", "requests", "failed", "refused", *names, box=None, pad_edge=False)
    for name, counts, row in (
        ("candidate", evidence.candidate, evidence.seen[1]),
        ("stable", evidence.stable, evidence.seen[0]),
    ):
        quantiles = quantiles_us(row, now.plan.quantiles)
        bands = bands_us(row, now.plan.quantiles)
        shown = [
            "-" if us is None else f"{us / 1000:.3g} ms ({low / 1000:.3g} .. {high / 1000:.3g})"
            for us, (low, high) in zip(quantiles, bands, strict=True)
        ]
        table.add_row(name, str(counts.requests), str(counts.errors), str(counts.refused), *shown)
    return table


def _segments(shadow: ShadowStory) -> RenderableType:
    """Shows how the scores differ from the live version's, the first segments only."""
    table = Table(
        "segment", "rows", "live", "difference", "absolute", "of the mean score", box=None, pad_edge=False
    )
    for segment in shadow.segments[:_SEGMENTS]:
        table.add_row(
            segment.name,
            str(segment.rows),
            f"{segment.live:.4g}",
            f"{segment.difference:+.3g}",
            f"{segment.absolute:.3g}",
            Text(segment.share, style="bold red" if segment.beyond else ""),
        )
    return table


def _story(decisions: Sequence[Decision]) -> RenderableType:
    table = Table("when", "phase", "traffic", "why", "by", box=None, pad_edge=False)
    for decision in decisions[-_DECISIONS:]:
        why = Text(decision.reason, overflow="ellipsis", no_wrap=True)
        table.add_row(when(decision.t)[11:], decision.phase, f"{decision.weight:g}%", why, decision.by)
    return table
