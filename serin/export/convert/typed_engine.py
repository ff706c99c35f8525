"""Builds and inspects a strongly typed engine, with the Python API that TensorRT and TensorRT for RTX share.

Precision comes from the graph alone: TensorRT 11 has no flag for it, and the exporter's fp16 graph already keeps in
fp32 what needs it. Does not run anything: building needs a GPU with TensorRT and none with TensorRT for RTX.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from serin.errors import ExportFailed

Api = Any  # the module tensorrt or tensorrt_rtx_bindings: neither has types, and both may be absent

_COMPILED = re.compile(
    r"^Name: (?P<name>[^,]+), LayerType: (?P<kind>[^,]+),.*?(?P<rest>Outputs: .*)$", re.MULTILINE
)
_OUTPUT_TYPE = re.compile(r"Datatype: (\w+)")
_PLACE = re.compile(r" ?In \w+ at /_src/[^\s):]*:\d+")  # in the library's own sources
_NO_DRIVER = "catchCudaError"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTensor:
    """An input or output. `shape`: -1 where any number of rows fits."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayer:
    """A layer: of the parsed network, or one that the builder made of several. `dtype`: of its first output."""

    name: str
    kind: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A serialised engine, with what the parser understood (`layers`) and what the builder made of it (`compiled`)."""

    plan: bytes
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    layers: tuple[EngineLayer, ...]
    compiled: tuple[EngineLayer, ...]

    def precisions(self) -> dict[str, int]:
        """Returns the number of compiled layers by the type of their output."""
        return dict(Counter(layer.dtype for layer in self.compiled if layer.dtype))


def build_engine(
    api: Api,
    graph: onnx.ModelProto,
    *,
    sizes: Sequence[int],
    what: str,
    configure: Callable[[Any], None] | None = None,
) -> Engine:
    """Returns an engine with one profile for each number of rows in `sizes`.

    Raises ExportFailed with the node that cannot be converted. `what` names the engine in it; `configure` may set more
    of the builder's configuration.
    """
    lines: list[str] = []
    logger = _collecting_logger(api, lines)
    builder = api.Builder(logger)
    typed = getattr(api.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # where it is not the only way
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = api.OnnxParser(network, logger)
    if not parser.parse(graph.SerializeToString()):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        raise ExportFailed(what=what, reason="; ".join(_describe(error) for error in errors) or "not parsed")
    config = builder.create_builder_config()
    config.profiling_verbosity = api.ProfilingVerbosity.DETAILED
    if configure is not None:
        configure(config)
    for profile in _profiles(builder, network, sizes):
        config.add_optimization_profile(profile)
    lines.clear()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        reason = (
            "; ".join(_cleaned(line) for line in lines if "Error" in line) or "the builder gave no reason"
        )
        raise ExportFailed(what=what, reason=reason)
    return Engine(
        plan=bytes(plan),
        inputs=tuple(_tensor(network.get_input(index)) for index in range(network.num_inputs)),
        outputs=tuple(_tensor(network.get_output(index)) for index in range(network.num_outputs)),
        layers=tuple(_layer(network.get_layer(index)) for index in range(network.num_layers)),
        compiled=_compiled(lines),
    )


def load_refusal(api: Api, plan: bytes) -> str:
    """Returns why the runtime does not load an engine on this machine, in its words; empty when it does."""
    lines: list[str] = []
    runtime = api.Runtime(_collecting_logger(api, lines))
    if runtime.deserialize_cuda_engine(plan) is not None:
        return ""
    errors = [_cleaned(line) for line in lines if "error" in line.lower() or "compute capability" in line]
    return "; ".join(dict.fromkeys(errors)) or "the runtime gave no reason"


def _collecting_logger(api: Api, lines: list[str]) -> Any:
    class Collecting(api.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            api.ILogger.__init__(self)

        def log(self, _severity: Any, text: str) -> None:
            lines.append(text)

    return Collecting()


def _describe(error: Any) -> str:
    """Returns a parser's error in one line, with the node first."""
    node, operator = error.node_name(), error.node_operator()
    place = f"node {node!r} ({operator}): " if node else ""
    text = [line for line in error.desc().splitlines() if line and _NO_DRIVER not in line]
    told = [line for line in text if not line.startswith("Invalid Node")] or text
    plain = _cleaned("; ".join(told))
    return f"{place}{plain if plain not in ('', 'false') else 'the operator is not supported'}"


def _cleaned(text: str) -> str:
    return _PLACE.sub("", text.replace("\n", "; ")).strip()


def _tensor(tensor: Any) -> EngineTensor:
    return EngineTensor(name=tensor.name, dtype=tensor.dtype.name, shape=tuple(tensor.shape))


def _layer(layer: Any) -> EngineLayer:
    output = layer.get_output(0) if layer.num_outputs else None
    return EngineLayer(name=layer.name, kind=layer.type.name, dtype=output.dtype.name if output else "")


def _compiled(lines: Sequence[str]) -> tuple[EngineLayer, ...]:
    """Returns the engine's layers from the builder's report: an engine cannot be opened without a GPU."""
    report = next((line for line in lines if line.startswith("Layers:")), "")
    found = []
    for match in _COMPILED.finditer(report.partition("\n")[2]):
        kinds = _OUTPUT_TYPE.findall(match["rest"])
        found.append(
            EngineLayer(name=match["name"], kind=match["kind"], dtype=kinds[0].upper() if kinds else "")
        )
    return tuple(found)


def _profiles(builder: Any, network: Any, sizes: Sequence[int]) -> list[Any]:
    """Returns one profile per size, from the size before it: an engine is fastest at the shape it was tuned for."""
    profiles, least = [], 1
    for rows in sorted(set(sizes)):
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            width = tensor.shape[1]
            profile.set_shape(tensor.name, (least, width), (rows, width), (rows, width))
        profiles.append(profile)
        least = rows
    return profiles
