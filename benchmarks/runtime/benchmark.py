"""The runtime benchmark: a bundle's network at 1, 64 and 4,096 rows against torch, ONNX Runtime and OpenVINO.

For each size the network is exported as somebody would who declares such requests (`export.batch_mix`), so that the
gate chooses variant and threads for it. Beside the race: every variant's size, time and metric, also where it loses.
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
from benchmarks.machine import cores, machine
from benchmarks.race import Lap, Result, Role, Unequal, race
from benchmarks.report import Report
from benchmarks.runtime.bundles import make_bundles

PEERS = ROOT / ".venv-bench" / "bin" / "python"
TIMES = {1: 400, 64: 120, 4096: 4}
TOLERANCE = 0.05  # of a score: what the gate allows a variant
PEER_TOLERANCE = 0.005  # OpenVINO calculates in float16 where the processor can
MODULE = "benchmarks.runtime.contenders"


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    versions: dict[str, dict[str, str]] = {}
    contenders: dict[str, tuple[Role, str]] = {
        "ours": ("ours", sys.executable),
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
            child = stack.enter_context(Child(MODULE, python=python, threads=cores()))
            versions[name] = child.versions
            runners[name] = (role, child)
        results = {}
        for size, bundle in made.items():
            say(f"{size} rows: {bundle['chosen']} with {bundle['threads']} thread(s)")
            results[f"{size} rows, {bundle['chosen']}"] = _race(runners, size, bundle, full)
    line = {}
    for size, case in zip(made, results.values(), strict=True):
        peers = [result for result in case.values() if result.role == "peer"]
        line[f"best_{size}"] = min(peer.times_as_long_as(case["ours"]) for peer in peers)
    return Report(
        benchmark="runtime",
        mode="full" if full else "quick",
        environment={"machine": machine(), "threads": cores(), "versions": versions},
        cases=results,
        line={"best": min(line.values()), **line},
        notes=notes,
        tables=[_variants(size, bundle["variants"]) for size, bundle in made.items()],
        figures={str(size): bundle["variants"] for size, bundle in made.items()},
    )


def _absent() -> dict[str, str]:
    absent = {}
    asked = [str(PEERS), "-c", "import openvino"]
    if not PEERS.exists() or subprocess.run(asked, capture_output=True).returncode:
        absent["openvino"] = "it is not in the peers' environment (make bench-setup)"
    if shutil.which("g++") is None or importlib.util.find_spec("torch") is None:
        absent["torch_compile"] = "it needs a C++ compiler"
    return absent


def _race(
    runners: dict[str, tuple[Role, Child]], size: int, bundle: Mapping[str, Any], full: bool
) -> dict[str, Result]:
    expected: list[float] = []

    def request(name: str, _turn: int) -> Mapping[str, Any]:
        return {
            "who": name, "case": f"{name}-{size}", "times": TIMES[size] * (4 if full else 1), "threads": cores(),
            "ort_threads": bundle["threads"], **{key: bundle[key] for key in ("core", "plain", "weights", "rows")},
        }  # fmt: skip

    def accept(name: str, _asked: Mapping[str, Any], lap: Lap) -> None:
        scores = lap.answer["scores"]
        if name == "torch_eager" and not expected:
            expected.extend(scores)
        if name != "limit" and expected:
            worst = max(abs(one - other) for one, other in zip(scores, expected, strict=True))
            if worst > (TOLERANCE if name == "ours" else PEER_TOLERANCE):
                raise Unequal(f"{name} is off by {worst:.3g} at {size} rows")

    return race(runners, request, accept)


def _variants(size: int, variants: list[dict[str, Any]]) -> str:
    """Size, time and metric of each, side by side."""
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
