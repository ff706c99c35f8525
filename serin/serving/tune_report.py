"""What a tuning found, for people: serving.yaml with a reason for each value, and a plot of latency over throughput."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from serin.serving.tune import Tuning
from serin.serving.tune_requests import in_words
from serin.serving.tune_trials import Settings, Trial, as_spec
from serin.serving.tuned import DEVICE, KEYS, cores, write_tuned

PLOT = "serving.svg"
_WIDE, _HIGH, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 420, 64, 56, 20, 48
_COLOURS = {"chosen": "#0b7a53", "before": "#2b5fb4", "other": "#b9bec7"}


def write_report(tuning: Tuning) -> tuple[Path, Path]:
    """The settings and the plot, beside the model's versions."""
    settings = write_tuned(tuning.bundle, list(heading(tuning)), values(tuning))
    plot = settings.with_name(PLOT)
    plot.write_text(draw(tuning), encoding="utf-8")
    return settings, plot


def heading(tuning: Tuning) -> Iterator[str]:
    bundle, steady = tuning.bundle, tuning.steady
    yield f"How {bundle.model} is served on this machine, unless its spec names values of its own."
    yield (
        f"Measured by `serin tune {bundle.model}` with version {bundle.version}, {datetime.now(UTC):%Y-%m-%d}, on "
        f"{cores()} cores in {tuning.seconds:.0f} s:"
    )
    yield (
        f"{len(tuning.trials)} settings, requests of {in_words(tuning.mix)}; straight to Triton over HTTP, p99 at most "
        f"{tuning.p99_ms:g} ms."
    )
    yield from findings(tuning)
    yield (
        f"In an open loop at {tuning.steady_requests_per_s:,.0f} requests/s: p50 {steady.quantile_ms(0.5):.1f} ms, p99 "
        f"{steady.quantile_ms(0.99):.1f} ms, {steady.failed} of {steady.requests} failed."
    )


def findings(tuning: Tuning) -> Iterator[str]:
    now, then = (trial.requests_per_s(tuning.p99_ms) for trial in (tuning.before, tuning.chosen))
    if tuning.better:
        yield (
            f"{tuning.gain:.2f} times the requests/s of the settings before, measured in turns (in the search: "
            f"{then:,.0f} after {now:,.0f})."
        )
    else:
        yield f"{now:,.0f} requests/s with the settings in use; nothing tried was better by more than 3%."


def values(tuning: Tuning) -> dict[str, tuple[int | str, str]]:
    chosen = tuning.chosen.settings
    found = {key: (as_spec(chosen)[key], _why(tuning, key)) for key in KEYS}
    if len(tuning.devices) > 1:
        found[DEVICE] = ("auto" if chosen.device == "gpu" else "cpu", _why_device(tuning))
    return found


def _why_device(tuning: Tuning) -> str:
    """What each device gave with the settings that suit it."""
    names = {"gpu": "a GPU", "cpu": "the CPU"}
    gave = [
        f"{names[device]} {best.requests_per_s(tuning.p99_ms):,.0f}/s ({best.settings.instances} x "
        f"{best.settings.threads})"
        for device, best in sorted(tuning.devices.items(), reverse=True)
    ]
    price = "" if tuning.gpu_price == 1 else f", a GPU counted as {tuning.gpu_price:g} times the price"
    return f"{names[tuning.chosen.settings.device]}; {', '.join(gave)}{price}"


def _why(tuning: Tuning, key: str) -> str:
    """What the other values of this key gave, everything else as chosen."""
    means = {
        "instances": "processes that score at the same time",
        "threads": "of ONNX Runtime in each",
        "queue_delay_us": "how long a request may wait for company",
        "max_batch_rows": "in one run, and in one request",
    }[key]
    chosen = tuning.chosen.settings
    groups = [
        [trial for trial in tuning.trials if _same_but(trial.settings, like.settings, key)]
        for like in tuning.trials
        if as_spec(like.settings)[key] == as_spec(chosen)[key]
    ]
    there = chosen.device
    alike = max(
        groups, key=lambda group: (group[0].settings.device == there, len(group), tuning.chosen in group)
    )
    if len(alike) == 1:
        return f"{means}; nothing else was tried"
    alike.sort(key=lambda trial: as_spec(trial.settings)[key])
    tried = ", ".join(
        f"{as_spec(trial.settings)[key]}: {trial.requests_per_s(tuning.p99_ms):,.0f}/s" for trial in alike
    )
    return f"{means}; {tried}{_beside(alike[0].settings, chosen, key)}"


def _beside(one: Settings, chosen: Settings, key: str) -> str:
    """Where the values were compared beside others than those that were chosen at last."""
    other = {
        name: value for name, value in as_spec(one).items() if name != key and value != as_spec(chosen)[name]
    }
    return f" (with {', '.join(f'{name} {value}' for name, value in other.items())})" if other else ""


def _same_but(one: Settings, other: Settings, key: str) -> bool:
    changed: Any = {key: as_spec(other)[key]}
    return replace(one, **changed) == other


def to_json(tuning: Tuning, settings: Path, plot: Path) -> dict[str, Any]:
    return {
        "model": tuning.bundle.model,
        "version": tuning.bundle.version,
        "p99_ms": tuning.p99_ms,
        "mix": {str(rows): share for rows, share in tuning.mix.items()},
        "better": tuning.better,
        "gain": tuning.gain,
        "before": _trial_json(tuning.before),
        "chosen": _trial_json(tuning.chosen),
        "trials": [_trial_json(trial) for trial in tuning.trials],
        "seconds": tuning.seconds,
        "settings": str(settings),
        "plot": str(plot),
    }


def _trial_json(trial: Trial) -> dict[str, Any]:
    points = [
        {name: getattr(point, name) for name in type(point).__dataclass_fields__} for point in trial.points
    ]
    return {**as_spec(trial.settings), "points": points}


def draw(tuning: Tuning) -> str:
    """p99 (logarithmic) over requests/s, a line for each setting tried."""
    shown = [trial for trial in tuning.trials if trial.points]
    points = [point for trial in shown for point in trial.points]
    fastest = max(point.requests_per_s for point in points) * 1.05
    low = min(point.p99_ms for point in points) / 1.3
    high = max(*(point.p99_ms for point in points), tuning.p99_ms) * 1.3

    def x(requests_per_s: float) -> float:
        return _LEFT + requests_per_s / fastest * (_WIDE - _LEFT - _RIGHT)

    def y(ms: float) -> float:
        share = math.log(ms / low) / math.log(high / low)
        return _HIGH - _BOTTOM - share * (_HIGH - _BOTTOM - _TOP)

    parts = [*_axes(fastest, low, high, x, y), _limit(tuning.p99_ms, y)]
    for role in ("other", "before", "chosen"):
        for trial in shown:
            if _role(tuning, trial) == role:
                parts += _line(trial, role, x, y)
    parts += _legend(tuning)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#333">\n'
        f'<rect width="{_WIDE}" height="{_HIGH}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _role(tuning: Tuning, trial: Trial) -> str:
    if trial.settings == tuning.chosen.settings:
        return "chosen"
    return "before" if trial.settings == tuning.before.settings else "other"


def _axes(fastest: float, low: float, high: float, x: Any, y: Any) -> Iterator[str]:
    step = 10 ** math.floor(math.log10(fastest)) / 2
    for number in range(int(fastest / step) + 1):
        at = x(number * step)
        yield f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_HIGH - _BOTTOM}" stroke="#eee"/>'
        yield f'<text x="{at:.1f}" y="{_HIGH - _BOTTOM + 16}" text-anchor="middle">{number * step:,g}</text>'
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for digit in (1, 2, 5):
            ms = digit * 10.0**exponent
            if low <= ms <= high:
                yield f'<line x1="{_LEFT}" y1="{y(ms):.1f}" x2="{_WIDE - _RIGHT}" y2="{y(ms):.1f}" stroke="#eee"/>'
                yield f'<text x="{_LEFT - 6}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:g}</text>'
    yield f'<text x="{_WIDE / 2}" y="{_HIGH - 10}" text-anchor="middle">requests/s</text>'
    yield f'<text x="{_LEFT - 6}" y="{_TOP - 8}" text-anchor="end">p99, ms</text>'


def _limit(p99_ms: float, y: Any) -> str:
    at = y(p99_ms)
    return (
        f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDE - _RIGHT}" y2="{at:.1f}" stroke="#c0392b" '
        f'stroke-dasharray="5 4"/>\n<text x="{_WIDE - _RIGHT}" y="{at - 5:.1f}" text-anchor="end" fill="#c0392b">'
        f"at most {p99_ms:g} ms</text>"
    )


def _line(trial: Trial, role: str, x: Any, y: Any) -> Iterator[str]:
    places = [(x(point.requests_per_s), y(point.p99_ms)) for point in trial.points]
    joined = " ".join(f"{left:.1f},{down:.1f}" for left, down in places)
    width = 1 if role == "other" else 2
    yield (
        f'<polyline points="{joined}" fill="none" stroke="{_COLOURS[role]}" stroke-width="{width}">'
        f"<title>{escape(str(trial.settings))}</title></polyline>"
    )
    for (left, down), point in zip(places, trial.points, strict=True):
        yield (
            f'<circle cx="{left:.1f}" cy="{down:.1f}" r="3" fill="{_COLOURS[role]}"><title>{point.clients} clients: '
            f"{point.requests_per_s:,.0f} requests/s, p99 {point.p99_ms:.2f} ms</title></circle>"
        )


def _legend(tuning: Tuning) -> Iterator[str]:
    lines = {"chosen": f"chosen: {tuning.chosen.settings}", "before": f"before: {tuning.before.settings}"}
    if not tuning.better:
        del lines["before"]
    for row, (role, text) in enumerate(lines.items()):
        down = 18 + 16 * row
        yield f'<rect x="{_LEFT}" y="{down - 9}" width="10" height="10" fill="{_COLOURS[role]}"/>'
        yield f'<text x="{_LEFT + 16}" y="{down}">{escape(text)}</text>'
