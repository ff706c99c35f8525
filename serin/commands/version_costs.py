"""The costs of a version, for `serin models show`: those of its stages, and of serving it on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from serin.commands.output import human_bytes
from serin.formats.serving.serving_cost import ServingCost, read_serving_cost
from serin.machine import environment
from serin.store.artifacts import Release
from serin.store.receipt import Receipt
from serin.store.version_cost import read_version_cost

if TYPE_CHECKING:
    from serin.store.artifacts import Bundle

_UNITS = {"cpu_s": "CPU s", "gpu_s": "GPU s", "joules": "J", "cost": "cost"}


def costs_json(bundle: Bundle, lineage: Mapping[str, Any]) -> dict[str, Any]:
    name = Release(model=bundle.model, version=bundle.version).name
    serving = read_serving_cost(environment.home(), name)
    made = read_version_cost(environment.home(), name, lineage)
    return {**made.to_json(), "serving": None if serving is None else serving.to_json()}


def cost_lines(bundle: Bundle, lineage: Mapping[str, Any]) -> list[str]:
    """One line per stage, their sum, and serving. Nothing when nothing is known."""
    home, name = environment.home(), Release(model=bundle.model, version=bundle.version).name
    made, serving = read_version_cost(home, name, lineage), read_serving_cost(home, name)
    lines = [f"    {stage:<8} {_receipt(receipt)}" for stage, receipt in made.receipts.items()]
    if lines:
        unknown = f" (unknown: {', '.join(made.unknown)})" if made.unknown else ""
        numbers = _numbers(seconds=made.seconds, gpu_s=made.gpu_s, joules=made.joules, cost=made.cost)
        lines.append(f"    {'together':<8} {numbers}{unknown}")
    if serving is not None:
        lines += [f"    {'serving':<8} {line}" for line in _serving(serving)]
    return ["  cost", *lines] if lines else []


def _receipt(receipt: Receipt) -> str:
    """Time, device, and what was measured of it."""
    shares = [cost.busy_share for cost in receipt.device if cost.busy_share is not None]
    peaks = [cost.peak_bytes for cost in receipt.device if cost.peak_bytes is not None]
    parts = [
        _numbers(seconds=receipt.seconds, joules=receipt.joules, cost=receipt.cost),
        f"on {', '.join(dict.fromkeys(cost.name for cost in receipt.device))}",
        f"busy {sum(shares) / len(shares):.0%}" if shares else "",
        f"{human_bytes(sum(peaks))} at most" if peaks else "",
        "" if receipt.data_wait_share is None else f"waiting for data {receipt.data_wait_share:.0%}",
        "" if receipt.mfu is None else f"MFU {receipt.mfu:.1%}",
    ]
    return ", ".join(part for part in parts if part)


def _serving(cost: ServingCost) -> list[str]:
    whole = _numbers(seconds=cost.seconds, gpu_s=cost.gpu_s, joules=cost.joules, cost=cost.cost)
    parts = [
        f"{cost.predictions:,} predictions in {whole}, {cost.cpu_s:,.1f} CPU s",
        f"{human_bytes(cost.peak_memory_bytes)} at most",
        "" if cost.gpu_peak_bytes is None else f"{human_bytes(cost.gpu_peak_bytes)} of GPU memory at most",
        "" if cost.busy_share is None else f"GPU busy {cost.busy_share:.0%} while alone on it",
    ]
    lines = [", ".join(part for part in parts if part)]
    each = cost.per_1000()
    if each:
        numbers = ", ".join(f"{each[name]:.4g} {unit}" for name, unit in _UNITS.items() if name in each)
        lines.append(f"per 1,000 predictions: {numbers}")
    return lines


def _numbers(
    *, seconds: float, gpu_s: float = 0.0, joules: float | None = None, cost: float | None = None
) -> str:
    parts = [
        f"{seconds:,.1f} s",
        f"{gpu_s:,.1f} GPU s" if gpu_s else "",
        "" if joules is None else f"{joules:,.0f} J",
        "" if cost is None else f"cost {cost:,.4f}",
    ]
    return ", ".join(part for part in parts if part)
