"""Builds the variants in which a network may be served, each from the same graph and the same training rows.

A variant that cannot be built here gives a reason, never a failure: the gate's report lists it with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from serin.export.convert.network import Network
from serin.export.convert.onnx2rtx import rtx_reason
from serin.export.convert.onnx2trt import missing_tensorrt
from serin.export.session import Device
from serin.export.variants.fp16 import to_fp16
from serin.export.variants.int8 import to_int8, to_int8_dynamic
from serin.export.variants.int8_embeddings import to_int8_embeddings
from serin.formats.wire import Array

CALIBRATION_ROWS = 2048
MAX_ROWS = 1024
_ENGINES: Mapping[str, Device] = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A network's graph as it would be served.

    `steady`: a row's score does not depend on the other rows of its batch. `learned`: it was trained further after it
    was made, so its scores may differ and only its quality counts. `experimental`: it is measured, but never served.
    """

    name: str
    graph: onnx.ModelProto
    device: Device = "cpu"
    steady: bool = True
    learned: bool = False
    experimental: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    name: str
    reason: str


def build_variants(
    names: Sequence[str],
    network: Network,
    rows: Mapping[str, Array],
    device: Device,
    *,
    max_rows: int = MAX_ROWS,
) -> Iterator[Variant | Unavailable]:
    """Builds every requested variant, fp32 first. `rows`: num and cat of training rows, for calibration. `max_rows`:
    the largest batch that an engine is built for."""
    builders: Mapping[str, Callable[[], onnx.ModelProto | str]] = {
        "fp32": lambda: network.graph,
        "fp16": lambda: to_fp16(network.graph, rows),
        "int8": lambda: to_int8(network.graph, rows),
        "int8_dynamic": lambda: to_int8_dynamic(network.graph),
        "int8_embeddings": lambda: to_int8_embeddings(network.graph),
        "pruned": lambda: network.smaller.get("pruned", "the training wrote no pruned weights"),
        "tensorrt": lambda: missing_tensorrt() or to_fp16(network.graph, rows),
        "tensorrt_rtx": lambda: _for_rtx(to_fp16(network.graph, rows), max_rows),
    }
    for name in sorted(names, key=lambda name: name != "fp32"):
        made = builders[name]()
        if isinstance(made, str):
            yield Unavailable(name=name, reason=made)
        else:
            yield Variant(
                name=name,
                graph=made,
                device=_ENGINES.get(name, device),
                steady=name != "int8_dynamic",
                learned=name == "pruned",
                experimental=name == "tensorrt_rtx",
            )


def _for_rtx(graph: onnx.ModelProto | str, max_rows: int) -> onnx.ModelProto | str:
    return graph if isinstance(graph, str) else rtx_reason(graph, max_rows=max_rows) or graph
