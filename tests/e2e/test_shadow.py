"""Recorded requests sent to a candidate on a real Triton before it has traffic."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from serin.formats.schema import INT64_NULL
from serin.monitoring.capture.read import captured
from serin.rollout.decide.plan import ShadowPlan
from serin.rollout.decide.shadow import Tally
from serin.rollout.decide.state import Phase, Rollout
from serin.serving.client.client import Client
from serin.serving.triton.repository import build_repository
from serin.stack.wiring import CONTROLLER
from serin.store.artifacts import Release
from tests.chaos.stage import PLAN, Stage, stage
from tests.fakes.records import recorded_rows
from tests.signals import hit
from tests.unit.serving import bundles

SPEC = (
    "serving: {p99_ms: 500, request_timeout: 4s}\n"
    "export: {segments: [carrier]}\n"
    "monitoring: {capture: {share: 1.0}}\n"
)
# Slow requests on a busy machine are not what this is about.
SHADOW = replace(
    PLAN, steps=(100.0,), min_requests=0, bake_s=1.0, slo_ms=None, shadow=ShadowPlan(rows=60, time_s=1.0)
)


def ask_live_version(scene: Stage) -> int:
    """Sends rows to the gateway with what no golden row has: a new carrier, and distances that are null. Returns how
    many requests these were, once they are recorded."""
    columns = recorded_rows(160)
    columns["distance"][::9] = INT64_NULL
    sizes = [1] * 100 + [3] * 20
    starts = np.cumsum([0, *sizes])
    with Client(f"http://127.0.0.1:{scene.port}", bundles.MODEL) as client:
        for begin, end in pairwise(starts):
            client.predict_wire({name: values[begin:end] for name, values in columns.items()}, bundles.SCHEMA)
    recorded = lambda: captured(scene.home, bundles.MODEL, columns=["_id"]).num_rows  # noqa: E731
    scene.wait(lambda: recorded() >= starts[-1] or None, "the records of what was asked", 60)
    return len(sizes)


def tampered(bias: float, wrong: str) -> onnx.ModelProto:
    """The graph with another answer where no golden row looks."""
    graph = bundles.graph(bias)
    nodes = graph.graph.node
    score = next(node for node in nodes if "score" in node.output)
    score.output[0] = "right"
    if wrong == "halved":
        keys = {"keys_strings": ["new"], "values_floats": [0.5], "default_float": 1.0}
        nodes.append(helper.make_node("LabelEncoder", ["carrier"], ["factor"], domain="ai.onnx.ml", **keys))
        nodes.append(helper.make_node("Mul", ["right", "factor"], ["score"]))
    else:
        nodes.append(helper.make_node("Equal", ["distance", "null"], ["missing distance"]))
        nodes.append(helper.make_node("Where", ["missing distance", "other", "none"], ["more"]))
        nodes.append(helper.make_node("Add", ["right", "more"], ["score"]))
        constants = (("null", np.int64(INT64_NULL)), ("other", np.float32(0.2)), ("none", np.float32(0)))
        graph.graph.initializer.extend(
            numpy_helper.from_array(np.array(value), name) for name, value in constants
        )
    return graph


def published(scene: Stage, wrong: str | None = None) -> Release:
    """The next version; what its Triton serves is changed, its bundle stays as it is."""
    bundle = bundles.publish(scene.store, bias=0.4, spec=SPEC)
    release = Release(model=bundle.model, version=bundle.version)
    if wrong is not None:
        folder = build_repository(bundle, scene.home / "releases" / release.name / "repository")
        served = next(Path(folder).rglob("model.onnx"))
        served.unlink()  # it may be a link to the bundle's own
        onnx.save(tampered(0.4, wrong), served)
    return release


def ended(scene: Stage, release: Release) -> Rollout:
    return scene.until(release, lambda now: now.phase.final, 120)


def test_a_candidate_must_serve_what_its_bundle_computes_before_a_client_reaches_it() -> None:
    with stage(spec=SPEC) as scene:
        scene.first_release()
        asked = ask_live_version(scene)
        for wrong, segment, column in (("halved", "carrier=new", "carrier"), ("nulls", "", "distance")):
            candidate = published(scene, wrong)
            scene.start(candidate, SHADOW)
            now = ended(scene, candidate)
            assert now.phase is Phase.ROLLED_BACK, now.reason
            found = Tally.from_json(now.evidence["shadow"]).mismatch
            assert found is not None, now.reason
            assert not segment or segment in found.segments
            assert found.values[column] == ("new" if wrong == "halved" else str(INT64_NULL))
            assert found.served != found.computed
            assert all(decision.weight == 0 for decision in scene.decisions(candidate))
        honest = published(scene)
        scene.start(honest, SHADOW)
        scene.until(honest, lambda now: now.phase is Phase.SHADOWING, 120)
        hit(scene.pid(CONTROLLER))
        now = ended(scene, honest)
        assert now.phase is Phase.PROMOTED, now.reason
        passed = next(found for found in scene.decisions(honest) if found.phase == Phase.BAKING)
        tally = Tally.from_json(passed.evidence["shadow"])
        assert tally.compared == tally.rows >= 60
        assert tally.segments["carrier=new"].rows > 0
        assert tally.counts.requests <= asked, "no request counted twice"
        assert tally.counts.errors == 0
        logged = scene.requests.read_text().splitlines()
        assert len(logged) == asked, "no recorded request went through the gateway"
        assert captured(scene.home, bundles.MODEL, columns=["_id"]).num_rows == 160, "or was recorded again"
