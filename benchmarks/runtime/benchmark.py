"""The runtime benchmark: a bundle's network at 1, 64 and 4,096 rows against torch, ONNX Runtime and OpenVINO.

For each size the network is exported with `export.batch_mix` set to that size, so that the gate chooses variant and
threads for it; our fp32 variant runs too. All answers must keep the same tolerance. Size, time and metric of every
variant are printed as well, also of those that lose.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child
from benchmarks.machine import machine
from benchmarks.race import Lap, Result, Role, Unequal, race
from benchmarks.report import Report
from benchmarks.runtime.bundles import make_bundles
from serin.machine.hardware import core_count

PEERS = ROOT / ".venv-bench" / "bin" / "python"
TIMES = {1: 400, 64: 120, 4096: 4}
TOLERANCE = 0.005  # of a score, for all contenders
MODULE = "benchmarks.runtime.contenders"


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    versions: dict[str, dict[str, str]] = {}
    contenders: dict[str, tuple[Role, str]] = {
        "ours": ("ours", sys.executable),
        "ours_fp32": ("ours", sys.executable),
        "onnxruntime": ("peer", sys.executable),
        "torch_eager": ("peer", sys.executable),
        "torch_compile": ("peer", sys.executable),
        "openvino": ("peer", str(PEERS)),
        "limit": ("limit", sys.executable),
    }
    notes = [f"without {name}: {why}" for name, why in _absent().items() if contenders.pop(name)]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        made = make_bundles(
            Path(scratch),
            rows=200_000 if full else 30_000,
            hidden=[512, 256] if full else [256, 128],
            batches=tuple(TIMES),
            say=say,
        )
        runners: dict[str, tuple[Role, Child]] = {}
        for name, (role, python) in contenders.items():
            child = stack.enter_context(Child(MODULE, python=python, threads=core_count()))
            versions[name] = child.versions
            runners[name] = (role, child)
        results = {}
        for size, bundle in made.items():
            say(f"{size} rows: {bundle['chosen']} with {bundle['ort_threads']} thread(s)")
            exact = _too_far_off(runners, size, bundle)
            notes += [
                f"{size} rows: {name} in fp32, because it deviated by {off:.2g}"
                for name, off in exact.items()
            ]
            chosen = "fp32" if "ours" in exact else bundle["chosen"]
            results[f"{size} rows, {chosen}"] = _race(runners, size, bundle, exact, full)
    return Report(
        benchmark="runtime",
        mode="full" if full else "quick",
        environment={"machine": machine(), "threads": core_count(), "versions": versions},
        cases=results,
        line=_line(dict(zip(made, results.values(), strict=True))),
        notes=notes,
        tables=[_variants(size, bundle["variants"]) for size, bundle in made.items()],
        figures={str(size): bundle["variants"] for size, bundle in made.items()},
    )


def _line(cases: Mapping[int, Mapping[str, Result]]) -> dict[str, float]:
    """Returns the best peer's time over ours, for each request size and the smallest of them."""
    line: dict[str, float] = {}
    for who, key in (("ours", "best"), ("ours_fp32", "best_fp32")):
        by_size = {f"{key}_{size}": _against_best(case, who) for size, case in cases.items()}
        line |= {key: min(by_size.values()), **by_size}
    return line


def _absent() -> dict[str, str]:
    absent = {}
    asked = [str(PEERS), "-c", "import openvino"]
    if not PEERS.exists() or subprocess.run(asked, capture_output=True).returncode:
        absent["openvino"] = "it is not in the peers' environment (make bench-setup)"
    if shutil.which("g++") is None or importlib.util.find_spec("torch") is None:
        absent["torch_compile"] = "it needs a C++ compiler"
    return absent


def _against_best(case: Mapping[str, Result], who: str) -> float:
    return min(peer.times_as_long_as(case[who]) for peer in case.values() if peer.role == "peer")


def _asked(name: str, size: int, bundle: Mapping[str, Any], *, times: int, exact: bool) -> dict[str, Any]:
    needed = ("core", "ort_threads", "fp32_core", "fp32_threads", "plain", "weights", "rows")
    return {
        "who": name, "case": f"{name}-{size}{'-exact' if exact else ''}", "times": times, "threads": core_count(),
        "exact": exact, **{key: bundle[key] for key in needed},
    }  # fmt: skip


def _too_far_off(
    runners: dict[str, tuple[Role, Child]], size: int, bundle: Mapping[str, Any]
) -> dict[str, float]:
    """Finds contenders that choose a precision below fp32 by themselves and deviate too far from torch: they run in
    fp32."""
    found = {
        name: runners[name][1].run(_asked(name, size, bundle, times=1, exact=False)).answer["scores"]
        for name in ("torch_eager", "ours", "openvino")
        if name in runners
    }
    wanted = found.pop("torch_eager")
    off = {name: _distance(scores, wanted) for name, scores in found.items()}
    return {name: worst for name, worst in off.items() if worst > TOLERANCE}


def _distance(scores: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(scores, wanted, strict=True))


def _race(
    runners: dict[str, tuple[Role, Child]],
    size: int,
    bundle: Mapping[str, Any],
    exact: Mapping[str, float],
    full: bool,
) -> dict[str, Result]:
    expected: list[float] = []

    def request(name: str, _turn: int) -> Mapping[str, Any]:
        return _asked(name, size, bundle, times=TIMES[size] * (4 if full else 1), exact=name in exact)

    def accept(name: str, _asked: Mapping[str, Any], lap: Lap) -> None:
        scores = lap.answer["scores"]
        if name == "torch_eager" and not expected:
            expected.extend(scores)
        if name != "limit" and expected:
            worst = _distance(scores, expected)
            if worst > TOLERANCE:
                raise Unequal(f"{name} deviates by {worst:.3g} at {size} rows")

    return race(runners, request, accept)


def _variants(size: int, variants: list[dict[str, Any]]) -> str:
    """Returns a table with size, time and metric of each variant."""
    head = f"  {'variant':<14}{'':<12}{'bytes':>12}{'us':>10}{'auc':>10}{'drop':>10}  reason"
    rows = [f"variants exported for requests of {size} rows", head]
    for one in variants:
        time_us, auc = one["mix_us"], one["metrics"].get("auc")
        cells = [
            f"{one['bytes']:>12,}" if one["bytes"] else f"{'-':>12}",
            f"{time_us:>10,.0f}" if time_us else f"{'-':>10}",
            f"{auc:>10.5f}" if auc is not None else f"{'-':>10}",
            f"{one['drop']:>+10.5f}" if one["drop"] is not None else f"{'-':>10}",
        ]
        rows.append(f"  {one['name']:<14}{one['status']:<12}{''.join(cells)}  {one['reason'][:110]}")
    return "\n".join([*rows, ""])
