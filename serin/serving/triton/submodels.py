"""The models of a release in its Triton: one, or a front, a core and the ensemble that combines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from serin.errors import BundleBroken
from serin.formats.bundle import CORE, FRONT, MODEL, PLAN, TREES, Manifest
from serin.formats.external_data import data_files
from serin.formats.schema import NULL_OF_KIND, DType, InputColumn, Kind, OutputTensor, Schema
from serin.machine.hardware import core_count
from serin.serving.native.onnx_backend import SETTINGS, Split, native_settings, unsupported_output
from serin.serving.triton.backends import Choice, Contents, Runner
from serin.serving.triton.model_config import (
    Configured,
    Settings,
    Step,
    ensemble_config,
    fil_config,
    native_config,
    onnxruntime_config,
    plan_config,
    python_config,
)
from serin.spec.serving import ServingSpec

_ELEMENTS: dict[int, DType] = {TensorProto.FLOAT: "FP32", TensorProto.INT64: "INT64"}
_MOST_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model's folder: its configuration, and the files of its version as bytes or by path."""

    name: str
    config: Configured
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    schema: Schema | None = None  # for Serin's model.py, if that runs it


def contents_of(folder: Path, manifest: Manifest, schema: Schema, serving: ServingSpec) -> Contents:
    """Returns the contents that decide the backend. `serving`: of the bundle's own spec, by which its engine was
    built."""
    files = frozenset(manifest.files)
    empty = None
    if CORE in files:
        empty = next((tensor.name for tensor in _inner(folder) if tensor.dims == (0,)), None)
    return Contents(
        model=f"{manifest.name} version {manifest.model_version}",
        files=files,
        task=schema.task,
        answers=schema.outputs[0].dims[-1],
        plan_rows=serving.max_batch_rows if PLAN in files else None,
        empty=empty,
        strings_out=unsupported_output(schema.outputs),
    )


def build_parts(folder: Path, schema: Schema, choice: Choice, settings: Settings) -> list[Part]:
    """Builds the models of a release; the model that clients call comes first."""
    model = settings.release.model
    if choice.backend == "onnxruntime":
        config = onnxruntime_config(schema, settings)
        return [Part(name=model, config=config, files=_with_data(folder, MODEL))]
    if choice.backend == "onnx_native":
        return [_native(folder, schema, choice, settings)]
    if choice.backend == "onnx_python":
        in_two = choice.place == "gpu" and (folder / CORE).is_file()
        graphs = (FRONT, CORE) if in_two else (MODEL,)
        config = python_config(schema, settings, graphs=graphs)
        return [Part(name=model, config=config, files=_with_data(folder, *graphs), schema=schema)]
    assert choice.front is not None, "a model in two parts has a front ..."
    assert choice.core is not None, "... and a core"
    front_name, core_name = f"{model}_front", f"{model}_core"  # no model name of Serin contains an underscore
    inner = _inner(folder)
    if choice.backend == "fil":
        return _with_trees(folder, schema, settings, choice.front, (front_name, core_name))
    front_schema = Schema(task=schema.task, inputs=schema.inputs, outputs=inner)
    columns = tuple(_as_input(tensor) for tensor in inner)
    core_schema = Schema(task=schema.task, inputs=columns, outputs=schema.outputs)
    core_file = PLAN if choice.core == "tensorrt" else CORE
    steps = [
        Step(model=front_name, inputs=_same(schema.inputs), outputs=_same(inner)),
        Step(model=core_name, inputs=_same(inner), outputs=_same(schema.outputs)),
    ]
    return [
        Part(name=model, config=ensemble_config(schema, settings, steps)),
        _part(front_name, choice.front, front_schema, settings.of_front(), folder / FRONT),
        _part(core_name, choice.core, core_schema, settings.of_core(), folder / core_file),
    ]


def _native(folder: Path, schema: Schema, choice: Choice, settings: Settings) -> Part:
    split = None
    if choice.place == "gpu":
        split = Split(
            inner=_inner(folder),
            max_rows=settings.serving.max_batch_rows,
            workers=settings.serving.threads or max(1, min(_MOST_WORKERS, core_count() // 2)),
            arena_bytes=settings.gpu_bytes,
        )
    asked = native_settings(
        schema,
        threads=settings.threads,
        max_string_bytes=settings.serving.max_string,
        split=split,
    )
    graphs = (FRONT, CORE) if split else (MODEL,)
    files = {**_with_data(folder, *graphs), SETTINGS: asked}
    return Part(name=settings.release.model, config=native_config(schema, settings), files=files)


def _with_trees(
    folder: Path, schema: Schema, settings: Settings, runner: Runner, names: tuple[str, str]
) -> list[Part]:
    graph, row = front_to_one_row(onnx.load_model(folder / FRONT), [column.name for column in schema.inputs])
    front_schema = Schema(task=schema.task, inputs=schema.inputs, outputs=(row,))
    steps = [
        Step(model=names[0], inputs=_same(schema.inputs), outputs={row.name: row.name}),
        Step(model=names[1], inputs={"input__0": row.name}, outputs={"output__0": schema.outputs[0].name}),
    ]
    return [
        Part(name=settings.release.model, config=ensemble_config(schema, settings, steps)),
        _part(names[0], runner, front_schema, settings.of_front(), graph.SerializeToString()),
        Part(
            name=names[1],
            config=fil_config(row.dims[0], settings.of_core(), name=names[1]),
            files={TREES: folder / TREES},
        ),
    ]


def _part(name: str, runner: Runner, schema: Schema, settings: Settings, graph: Path | bytes) -> Part:
    configs: dict[Runner, Callable[..., Configured]] = {
        "python": python_config,
        "onnxruntime": onnxruntime_config,
        "tensorrt": plan_config,
    }
    return Part(
        name=name,
        config=configs[runner](schema, settings, name=name),
        files={**_data_of(graph), PLAN if runner == "tensorrt" else MODEL: graph},
        schema=schema if runner == "python" else None,
    )


def _with_data(folder: Path, *graphs: str) -> dict[str, Path | bytes]:
    """Returns graphs of the bundle in `folder` and the files that they refer to."""
    files: dict[str, Path | bytes] = {}
    for name in graphs:
        files |= {name: folder / name, **_data_of(folder / name)}
    return files


def _data_of(graph: Path | bytes) -> dict[str, Path | bytes]:
    if not isinstance(graph, Path) or graph.suffix != ".onnx":
        return {}
    names = data_files(onnx.load_model(graph, load_external_data=False))
    return {name: graph.parent / name for name in names}


def front_to_one_row(front: onnx.ModelProto, taken: list[str]) -> tuple[onnx.ModelProto, OutputTensor]:
    """Returns the front with its numbers and codes in one float32 tensor, as trees were trained on them."""
    num, cat = (_of_type(front, kind) for kind in (TensorProto.FLOAT, TensorProto.INT64))
    name = "row"
    while name in taken or any(name in (*node.input, *node.output) for node in front.graph.node):
        name = f"_{name}"
    graph = onnx.ModelProto()
    graph.CopyFrom(front)
    codes = f"{name}/codes"
    graph.graph.node.extend(
        [
            helper.make_node("Cast", [cat.name], [codes], to=TensorProto.FLOAT),
            helper.make_node("Concat", [num.name, codes], [name], axis=1),
        ]
    )
    columns = num.dims[0] + cat.dims[0]
    del graph.graph.output[:]
    graph.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", columns]))
    return graph, OutputTensor(name=name, dtype="FP32", dims=(columns,))


def _inner(folder: Path) -> tuple[OutputTensor, ...]:
    """Returns the tensors between the front and the core."""
    graph = onnx.load_model(folder / CORE, load_external_data=False).graph
    return tuple(_tensor(info, str(folder / CORE)) for info in graph.input)


def _of_type(model: onnx.ModelProto, kind: int) -> OutputTensor:
    found = [info for info in model.graph.output if info.type.tensor_type.elem_type == kind]
    if len(found) != 1:
        raise BundleBroken(path=FRONT, reason="it must output one tensor of numbers and one of codes")
    return _tensor(found[0], FRONT)


def _tensor(info: onnx.ValueInfoProto, path: str) -> OutputTensor:
    dtype = _ELEMENTS.get(info.type.tensor_type.elem_type)
    sizes = [size.dim_value for size in info.type.tensor_type.shape.dim][1:]
    if dtype is None:
        raise BundleBroken(path=path, reason=f"its tensor {info.name!r} is neither float32 nor int64")
    return OutputTensor(name=info.name, dtype=dtype, dims=tuple(sizes))


def _as_input(tensor: OutputTensor) -> InputColumn:
    kind: Kind = "float" if tensor.dtype == "FP32" else "int"
    return InputColumn(
        name=tensor.name, dtype=tensor.dtype, kind=kind, null=NULL_OF_KIND[kind], dims=tensor.dims
    )


def _same(tensors: tuple[InputColumn, ...] | tuple[OutputTensor, ...]) -> dict[str, str]:
    return {tensor.name: tensor.name for tensor in tensors}
