"""Writes the result of a tuning: serving.yaml with a reason for each value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serin.evidence.histogram import latency_name
from serin.machine.hardware import core_count
from serin.serving.triton.repository import DEVICE, KEYS, Capacity, write_tuned
from serin.serving.tuning.requests import in_words
from serin.serving.tuning.trials import Settings, Trial, Tuning, as_spec


def write_report(tuning: Tuning) -> Path:
    """Writes the settings beside the model's versions."""
    best = tuning.chosen.best(tuning.limit_ms)
    capacity = Capacity(in_flight=best.clients, requests_per_s=tuning.steady_requests_per_s) if best else None
    return write_tuned(tuning.bundle, list(heading(tuning)), values(tuning), capacity)


def heading(tuning: Tuning) -> Iterator[str]:
    bundle, steady = tuning.bundle, tuning.steady
    yield f"How {bundle.model} is served on this machine, unless its spec sets these values."
    yield (
        f"Measured by `serin tune {bundle.model}` with version {bundle.version}, {datetime.now(UTC):%Y-%m-%d}, on "
        f"{core_count()} cores in {tuning.seconds:.0f} s:"
    )
    yield (
        f"{len(tuning.trials)} settings, requests of {in_words(tuning.mix)}; straight to Triton over HTTP, "
        f"{latency_name(tuning.share)} at most {tuning.limit_ms:g} ms."
    )
    yield from findings(tuning)
    yield (
        f"In an open loop at {tuning.steady_requests_per_s:,.0f} requests/s: p50 {steady.quantile_ms(0.5):.1f} ms, "
        f"{latency_name(tuning.share)} {steady.quantile_ms(tuning.share):.1f} ms, {steady.failed} of "
        f"{steady.requests} failed."
    )


def findings(tuning: Tuning) -> Iterator[str]:
    now, then = (trial.requests_per_s(tuning.limit_ms) for trial in (tuning.before, tuning.chosen))
    if tuning.better:
        yield (
            f"{tuning.gain:.2f} times the requests/s of the settings before, measured in turns (in the search: "
            f"{then:,.0f} after {now:,.0f})."
        )
    elif tuning.passed_over:
        seen = tuning.passed_over.requests_per_s(tuning.limit_ms)
        yield (
            f"{now:,.0f} requests/s with the settings in use, which stay: the best of the search "
            f"({tuning.passed_over.settings}; {seen:,.0f}/s) gave {tuning.passed_over_gain:.2f} times as many when "
            "both were measured in turns."
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
    """Describes the result of each device with its best settings."""
    names = {"gpu": "a GPU", "cpu": "the CPU"}
    gave = [
        f"{names[device]} {best.requests_per_s(tuning.limit_ms):,.0f}/s ({best.settings.instances} x "
        f"{best.settings.threads})"
        for device, best in sorted(tuning.devices.items(), reverse=True)
    ]
    price = "" if tuning.gpu_price == 1 else f", a GPU counted as {tuning.gpu_price:g} times the price"
    return f"{names[tuning.chosen.settings.device]}; {', '.join(gave)}{price}"


def _why(tuning: Tuning, key: str) -> str:
    """Describes the results of the other values of this key, with everything else as chosen."""
    means = {
        "instances": "that score at the same time",
        "threads": "of ONNX Runtime in each",
        "queue_delay": "how long a request may wait to be batched",
        "max_batch_rows": "in one run, and in one request",
    }[key]
    chosen = tuning.chosen.settings
    groups = [
        [trial for trial in tuning.trials if _others(trial.settings, key) == _others(like.settings, key)]
        for like in tuning.trials
        if as_spec(like.settings)[key] == as_spec(chosen)[key]
    ]
    there = chosen.device
    alike = max(
        groups, key=lambda group: (group[0].settings.device == there, len(group), tuning.chosen in group)
    )
    if len(alike) == 1:
        hint = " (with --max-rows it is)" if key == "max_batch_rows" else ""
        return f"{means}; nothing else was tried{hint}"
    alike.sort(key=lambda trial: getattr(trial.settings, key))
    tried = ", ".join(
        f"{as_spec(trial.settings)[key]}: {trial.requests_per_s(tuning.limit_ms):,.0f}/s" for trial in alike
    )
    return f"{means}; {tried}{_beside(alike[0].settings, chosen, key)}"


def _beside(one: Settings, chosen: Settings, key: str) -> str:
    """Describes where the values were compared with other settings than the final ones."""
    other = {name: value for name, value in _others(one, key).items() if value != as_spec(chosen)[name]}
    return f" (with {', '.join(f'{name} {value}' for name, value in other.items())})" if other else ""


def _others(settings: Settings, key: str) -> dict[str, int | str]:
    return {name: value for name, value in as_spec(settings).items() if name != key}


def to_json(tuning: Tuning, settings: Path) -> dict[str, Any]:
    return {
        "model": tuning.bundle.model,
        "version": tuning.bundle.version,
        "limit_ms": tuning.limit_ms,
        "share": tuning.share,
        "mix": {str(rows): share for rows, share in tuning.mix.items()},
        "better": tuning.better,
        "gain": tuning.gain,
        "before": _trial_json(tuning.before),
        "chosen": _trial_json(tuning.chosen),
        "passed_over": tuning.passed_over
        and {**_trial_json(tuning.passed_over), "gain": tuning.passed_over_gain},
        "trials": [_trial_json(trial) for trial in tuning.trials],
        "seconds": tuning.seconds,
        "settings": str(settings),
    }


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {**as_spec(trial.settings), "points": [asdict(point) for point in trial.points]}
