"""Candidates that answer recorded requests before they have traffic, on real parts: `python -m tests.chaos.shadow`.

A network is trained and served; its clients change (a new carrier, heavier parcels, missing weights), and what they
send is recorded. Then come candidates whose Triton serves other scores than their bundle computes, one that differs too
much from the live version, and `--honest N` versions (networks and trees in turn) that are trained again on rows of the
new kind. A version that passes waits for approval and is aborted, so that all are compared with the same one.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow.parquet as pq
from onnx import helper, numpy_helper

from serin import Pipeline
from serin.formats.schema import INT64_NULL, read_schema
from serin.formats.wire import Array, to_wire
from serin.monitoring.capture.read import captured
from serin.rollout.decide.plan import ShadowPlan
from serin.rollout.decide.shadow import Tally
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.serving.client.client import Client
from serin.serving.triton.repository import build_repository
from serin.store.artifacts import Bundle, Release
from tests.chaos.rollout import machine
from tests.chaos.stage import MODEL, PLAN, Stage, stage
from tests.fakes.small_pipeline import parcels, small_spec

# Slow requests on a busy machine are not what this is about.
SHADOW = replace(
    PLAN, steps=(100.0,), min_requests=0, bake_s=1.0, slo_ms=None, shadow=ShadowPlan(rows=60, time_s=1.0)
)
Tamper = Callable[[onnx.ModelProto], None]


def halves(column: str, value: str) -> Tamper:
    """Half of the score for the rows with this value."""

    def tamper(model: onnx.ModelProto) -> None:
        keys: dict[str, Any] = {"keys_strings": [value], "values_floats": [0.5], "default_float": 1.0}
        node = helper.make_node("LabelEncoder", [column], ["factor"], domain="ai.onnx.ml", **keys)
        model.graph.node.extend([node, helper.make_node("Mul", [_moved(model), "factor"], ["score"])])

    return tamper


def adds_where_null(column: str, other: str, value: str) -> Tamper:
    """Another score where an integer column is null and another one has this value: golden rows have nulls, too."""

    def tamper(model: onnx.ModelProto) -> None:
        keys: dict[str, Any] = {"keys_strings": [value], "values_floats": [0.02], "default_float": 0.0}
        nodes = [
            helper.make_node("Equal", [column, "tampered/null"], ["tampered/missing"]),
            helper.make_node("LabelEncoder", [other], ["tampered/some"], domain="ai.onnx.ml", **keys),
            helper.make_node(
                "Where", ["tampered/missing", "tampered/some", "tampered/none"], ["tampered/more"]
            ),
            helper.make_node("Add", [_moved(model), "tampered/more"], ["score"]),
        ]
        constants = {"null": np.int64(INT64_NULL), "none": np.float32(0)}
        tensors = [
            numpy_helper.from_array(np.array(given), f"tampered/{name}") for name, given in constants.items()
        ]
        model.graph.node.extend(nodes)
        model.graph.initializer.extend(tensors)

    return tamper


def _moved(model: onnx.ModelProto) -> str:
    """Gives the tensor of the score another name."""
    if not any(known.domain == "ai.onnx.ml" for known in model.opset_import):
        model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    last = next(node for node in model.graph.node if "score" in node.output)
    last.output[list(last.output).index("score")] = "tampered/right"
    return "tampered/right"


def serve_otherwise(scene: Stage, bundle: Bundle, tamper: Tamper) -> None:
    """Changes what the release's Triton will serve; its bundle stays as it is."""
    release = Release(model=bundle.model, version=bundle.version)
    folder = build_repository(bundle, scene.home / "releases" / release.name / "repository")
    served = next(Path(folder).rglob("model.onnx"))
    model = onnx.load(served)
    tamper(model)
    served.unlink()  # it may be a link to the bundle's own
    onnx.save(model, served)


def ask_live_version(scene: Stage, bundle: Bundle, columns: dict[str, Array]) -> int:
    """Sends rows to the gateway, some three at a time. Returns the number of requests once they are recorded."""
    rows, schema = len(next(iter(columns.values()))), read_schema(Path(bundle.path))
    starts = [*range(0, rows - 60, 1), *range(rows - 60, rows + 1, 3)]
    with Client(f"http://127.0.0.1:{scene.port}", bundle.model) as client:
        for begin, end in pairwise(starts):
            client.predict_wire({name: values[begin:end] for name, values in columns.items()}, schema)
    scene.wait(lambda: rows_recorded(scene) >= rows or None, "the records of what was asked", 90)
    return len(starts) - 1


def rows_recorded(scene: Stage) -> int:
    return int(captured(scene.home, MODEL, columns=["_id"]).num_rows)


def ended(scene: Stage, release: Release) -> Rollout:
    return scene.until(release, lambda now: now.phase.final, 240)


def tally_of(scene: Stage, release: Release) -> Tally:
    """What was seen of recorded requests when that ended."""
    found = [row.evidence["shadow"] for row in scene.decisions(release) if "shadow" in row.evidence]
    return Tally.from_json(found[-1] if found else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    ends: Phase
    says: str = ""
    drifted: bool = False  # trained on rows of the new kind
    tamper: Tamper | None = None
    shadow: ShadowPlan = ShadowPlan(rows=300, time_s=1.0)  # noqa: RUF009 (frozen)


CASES = (
    Case(name="halved in a segment", ends=Phase.ROLLED_BACK, tamper=halves("carrier", "drone"), says="carrier=drone"),
    Case(
        name="a null otherwise", ends=Phase.ROLLED_BACK, says="does not serve",
        tamper=adds_where_null("distance", "carrier", "drone"),
    ),
    Case(
        name="differs too much", ends=Phase.ROLLED_BACK, drifted=True, says="by more than 0.1% of the mean score",
        shadow=ShadowPlan(rows=300, time_s=1.0, max_difference=0.001),
    ),
)  # fmt: skip
HONEST = Case(name="honest retrain", ends=Phase.SHADOWING, drifted=True, says="as its bundle computes them")


def trained(folder: Path, number: int, *, drifted: bool) -> Bundle:
    """The next version, from other rows and another seed."""
    table = folder / f"parcels-{number}.parquet"
    pq.write_table(parcels(3000, seed=number, drifted=drifted), table)
    spec = {**small_spec(folder), "name": MODEL}
    spec["data"]["tables"] = {"parcels": str(table)}
    if number % 2:
        spec["model"], spec["training"] = {"kind": "xgboost", "rounds": 20}, {}
    spec["training"]["seed"] = number
    spec["export"] = {"segments": ["carrier"]}
    spec["monitoring"] = {"capture": {"share": 1.0}}
    pipeline = Pipeline(spec)
    pipeline.build_dataset()
    pipeline.train()
    model = pipeline.export(approved_by="chaos")
    return Bundle(path=str(model.path), model=MODEL, version=model.version, digest="")


def play(scene: Stage, case: Case, number: int) -> bool:
    bundle = trained(scene.home / "tables", number, drifted=case.drifted)
    release = Release(model=MODEL, version=bundle.version)
    if case.tamper:
        serve_otherwise(scene, bundle, case.tamper)
    began = time.monotonic()
    scene.start(release, replace(SHADOW, shadow=case.shadow, approve=(100.0,)))
    now = scene.until(release, lambda now: now.phase.final or now.hold is not None, 240)
    seconds, passed = time.monotonic() - began, now.hold is Hold.APPROVAL
    if not now.phase.final:
        scene.abort(release)
        ended(scene, release)
    seen = tally_of(scene, release)
    good = now.phase is case.ends and case.says in now.reason and passed == (case.ends is Phase.SHADOWING)
    good &= all(row.weight == 0 for row in scene.decisions(release))
    compared = f"{seen.rows} rows, {seen.compared} computed, {seen.unsteady} unsteady"
    outcome = "passed" if passed else now.phase.replace("_", " ")
    print(
        f"{case.name:<22} v{release.version:<4} {outcome:<12} {compared:<44} "
        f"{seconds:6.1f} s  {'yes' if good else 'NO'}  {now.reason[:150]}",
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.shadow", description=__doc__)
    parser.add_argument("--honest", type=int, default=20, metavar="N", help="versions that are trained again")
    honest = parser.parse_args().honest
    with stage() as scene:
        os.environ.update(SERIN_HOME=str(scene.home), SERIN_STORE=str(scene.home / "store"))
        (scene.home / "tables").mkdir()
        first = trained(scene.home / "tables", 0, drifted=False)
        scene.start(Release(model=MODEL, version=first.version), replace(SHADOW, shadow=None))
        ended(scene, Release(model=MODEL, version=first.version))
        columns = clients_rows(first, 600)
        asked = ask_live_version(scene, first, columns)
        print(f"{asked} requests of changed clients are recorded", flush=True)
        wanted = [play(scene, case, number) for number, case in enumerate(CASES, start=1)]
        wanted += [play(scene, HONEST, 100 + number) for number in range(honest)]
    print(f"\n{sum(wanted)} of {len(wanted)} as wanted, on {machine()}")
    return 0 if all(wanted) else 1


def clients_rows(bundle: Bundle, rows: int) -> dict[str, Array]:
    """Rows of the new kind in wire form, some distances missing."""
    table = parcels(rows, seed=77, drifted=True)
    columns = to_wire(table.select(["weight", "distance", "carrier"]), read_schema(Path(bundle.path)))
    columns["distance"] = np.where(np.arange(rows).reshape(-1, 1) % 9, columns["distance"], INT64_NULL)
    return columns


if __name__ == "__main__":
    sys.exit(main())
