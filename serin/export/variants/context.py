"""The reference that variants are compared with, and a variant as a runnable model: whole, or as a front and a core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from serin.export.convert.fuse import FeatureGraph, core_of, fuse
from serin.export.convert.onnx2trt import provider_options
from serin.export.gate.gate import GoldenRows
from serin.export.gate.quality import METRICS
from serin.export.variants.build import Variant
from serin.formats.gate import ScoreScale
from serin.formats.schema import Schema
from serin.formats.wire import Array
from serin.scoring.session import Device, FrontAndCore, Runs, open_session
from serin.spec.export import ExportSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRows:
    """The test split as the network takes it; `segments`: the rows of some segments ("carrier=AA")."""

    num: Array
    cat: Array
    target: Array
    segments: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantContext:
    """The reference that every variant is compared with."""

    spec: ExportSpec
    schema: Schema
    features: FeatureGraph
    golden: GoldenRows
    rows: TestRows
    max_rows: int
    split: bool = False  # a front on the CPU and a core on the variant's device
    scale: ScoreScale | None = None  # what differences between a regression's scores are measured in

    @property
    def outputs(self) -> list[str]:
        return [output.name for output in self.schema.outputs]

    @property
    def metric(self) -> str:
        return self.spec.budget.metric or METRICS[self.schema.task][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """A variant, ready to run: `model` is the whole graph, `runs` answers as it is served."""

    variant: Variant
    model: onnx.ModelProto
    core: onnx.ModelProto
    runs: Runs


def open_runnable(context: VariantContext, variant: Variant) -> Runnable:
    """Opens the variant as a model. Raises ExportFailed when its graph does not load."""
    model = fuse(context.features, variant.graph, context.schema)
    core = core_of(context.features, variant.graph, context.schema)
    runs: Runs
    if context.split or variant.device != "cpu":
        widths = {
            context.features.num: context.golden.num.shape[1],
            context.features.cat: context.golden.cat.shape[1],
        }
        options = provider_options(variant.device, widths, context.max_rows)
        runs = front_and_core(context.features, core, variant.device, options)
    else:
        runs = open_session(model, threads=1)
    return Runnable(variant=variant, model=model, core=core, runs=runs)


def front_and_core(
    features: FeatureGraph, core: onnx.ModelProto, device: Device, options: Mapping[str, Any] | None = None
) -> FrontAndCore:
    back = open_session(core, threads=1, device=device, options=options)
    return FrontAndCore(open_session(features.model, threads=1), back)
