"""The scale benchmark: curves over sizes, a controller with many models, and evidence of several gateways."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.child import Child
from benchmarks.machine import machine
from benchmarks.report import Report
from benchmarks.scale.clients_curve import measure_clients
from benchmarks.scale.curves import Curve
from benchmarks.scale.curves import table as curves_table
from benchmarks.scale.etl_curves import measure_etl
from benchmarks.scale.evidence_load import EvidenceCost, measure_evidence
from benchmarks.scale.log_curve import measure_log
from benchmarks.scale.model_curve import measure_model

MODELS = (10, 100)
ROLLOUTS_OF = 10  # one of so many models is rolled out
QUICK_TICKS, FULL_TICKS = 15, 200

Ticks = Mapping[int, Mapping[str, Any]]  # by the number of models


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    evidence = measure_evidence(full=full, say=lambda text: say(f"evidence: {text}"))
    controllers = measure_controllers(FULL_TICKS if full else QUICK_TICKS, say)
    curves, remarks = measure_curves(full=full, say=say)
    return Report(
        benchmark="scale",
        mode="full" if full else "quick",
        environment=machine(),
        cases={"evidence (CPU seconds)": dict(evidence.results)},
        line={
            **{curve.name: curve.slope for curve in curves},
            **last_line(evidence, controllers),
        },
        tables=[*curves_table(curves), *table(controllers)],
        figures={
            "controller": {str(models): dict(ticks) for models, ticks in controllers.items()},
            "curves": {curve.name: curve.to_json() for curve in curves},
        },
        notes=[
            "curves: the figure is the slope between the two largest sizes on logarithmic axes: 1 is linear",
            *remarks,
            "evidence: reading, cutting and judging the same requests; the judgements are equal",
            f"controller: one of {ROLLOUTS_OF} models is rolled out in the second figure; three hosts report",
        ],
    )


def measure_curves(*, full: bool, say: Callable[[str], None]) -> tuple[list[Curve], list[str]]:
    """Returns all curves, and remarks about them."""
    clients, rates = measure_clients(full=full, say=say)
    log, memory = measure_log(full=full, say=say)
    return [
        *measure_etl(full=full, say=say),
        *measure_model(full=full, say=say),
        *clients,
        *log,
    ], [*rates, *memory]


def measure_controllers(ticks: int, say: Callable[[str], None]) -> dict[int, dict[str, Any]]:
    """Each number of models in a new process, because of the memory."""
    found = {}
    for models in MODELS:
        with Child("benchmarks.scale.controller_load", python=sys.executable, threads=1) as child:
            request = {"models": models, "rollouts": models // ROLLOUTS_OF, "ticks": ticks}
            found[models] = child.run(request).answer
        say(f"controller: {models} models")
    return found


def last_line(evidence: EvidenceCost, controllers: Ticks) -> dict[str, float]:
    few, many = (controllers[models] for models in MODELS)
    return {
        "models": math.log(many["settled_ms"] / few["settled_ms"]) / math.log(MODELS[1] / MODELS[0]),
        "tick_cpu_ms": many["shifting_ms"],
        "controller_mb": many["memory_mb"],
        "evidence_lines_per_s": evidence.lines_per_s("three gateways"),
        "evidence_3": evidence.results["three gateways"].times_as_long_as(evidence.results["one gateway"]),
    }


def table(controllers: Ticks) -> list[str]:
    header = f"  {'models':<10}{'settled':>12}{'with rollouts':>16}{'in all':>12}{'memory':>12}"
    rows = [
        f"  {models:<10}{ticks['settled_ms']:>9.1f} ms{ticks['shifting_ms']:>13.1f} ms"
        f"{ticks['shifting_wall_ms']:>9.1f} ms{ticks['memory_mb']:>9.0f} MB"
        for models, ticks in controllers.items()
    ]
    return ["scale, a tick of the controller (CPU)", header, *rows, ""]
