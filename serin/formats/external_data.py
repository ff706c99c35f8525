"""Large weights of an ONNX graph: they stay in the safetensors file that training wrote, and the graph refers to them.

A graph with all of its weights inside ends at 2 GB, the limit of protobuf. A graph in memory names the file by its
absolute path, a graph on disk by the name of a file beside it. ONNX Runtime maps that file: a session has no copy of it
on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from serin.formats.trained import WEIGHTS

LIMIT_BYTES = 1_500_000_000  # of a file of weights: a graph contains those of a smaller one
_LEAST_BYTES = 1 << 20  # of a tensor that a graph refers to
_ELEMENTS = {
    "F64": TensorProto.DOUBLE, "F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16,
    "I64": TensorProto.INT64, "I32": TensorProto.INT32, "I8": TensorProto.INT8, "U8": TensorProto.UINT8,
}  # fmt: skip


def large_tensors(file: Path) -> dict[str, TensorProto]:
    """Returns references to the tensors of a safetensors file that a graph does not contain, by name: none of a file up
    to LIMIT_BYTES, else all but the small ones."""
    if file.stat().st_size <= LIMIT_BYTES:
        return {}
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(size))
    start = 8 + size
    found = {}
    for name, about in header.items():
        begin, end = about["data_offsets"] if name != "__metadata__" else (0, 0)
        if end - begin >= _LEAST_BYTES:
            tensor = TensorProto(
                name=name,
                data_type=_ELEMENTS[about["dtype"]],
                dims=about["shape"],
                data_location=TensorProto.EXTERNAL,
            )
            place = {"location": file.absolute(), "offset": start + begin, "length": end - begin}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            found[name] = tensor
    return found


def references(model: onnx.ModelProto) -> list[TensorProto]:
    """Returns the weights that the graph refers to."""
    return [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]


def external_tensors(message: Any) -> Iterator[TensorProto]:
    """Returns every tensor that is stored in another file, at any depth: also in attributes and subgraphs."""
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        for inner in (value,) if hasattr(value, "ListFields") else value:
            if descriptor.message_type.name != "TensorProto":
                yield from external_tensors(inner)
            elif inner.data_location == TensorProto.EXTERNAL or inner.external_data:
                yield inner


def graph_bytes(model: onnx.ModelProto) -> int:
    """Returns the size of a graph with the weights that it refers to."""
    return int(model.ByteSize()) + sum(int(place_of(tensor)["length"]) for tensor in references(model))


def place_of(tensor: TensorProto) -> dict[str, str]:
    """Returns location, offset and length of a tensor that is stored in another file."""
    return {entry.key: entry.value for entry in tensor.external_data}


def take_references(model: onnx.ModelProto) -> list[TensorProto]:
    """Makes the weights that the graph refers to its inputs, and returns them: ONNX's own functions look for the files
    of a graph in memory in the working directory."""
    graph, taken = model.graph, []
    for position in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[position]
        if tensor.data_location == TensorProto.EXTERNAL:
            graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
            taken.append(deepcopy(tensor))
            del graph.initializer[position]
    return taken


def give_references(model: onnx.ModelProto, taken: Sequence[TensorProto]) -> None:
    """Reverses `take_references`, also in a graph that was made of the given one."""
    names, graph = {tensor.name for tensor in taken}, model.graph
    for position in reversed(range(len(graph.input))):
        if graph.input[position].name in names:
            del graph.input[position]
    graph.initializer.extend(taken)


def check_graph(model: onnx.ModelProto, *, full: bool = False) -> None:
    """Raises ONNX's errors for a graph that is not valid. `full`: with the shapes of all tensors."""
    taken = take_references(model)
    try:
        onnx.checker.check_model(model, full_check=full)
    finally:
        give_references(model, taken)


def for_runtime(model: onnx.ModelProto) -> tuple[bytes, Path | None]:
    """Returns a graph in memory as ONNX Runtime takes it, and the folder of the files that it refers to."""
    files = [Path(place_of(tensor)["location"]) for tensor in references(model)]
    if not files:
        return model.SerializeToString(), None
    folder = Path(os.path.commonpath([file.parent for file in files]))
    named = _with_locations(model, {str(file): str(file.relative_to(folder)) for file in files})
    return named.SerializeToString(), folder


def write_graph(model: onnx.ModelProto, path: Path) -> None:
    """Writes a graph, and copies the files that it refers to beside it, unless another graph there has brought them."""
    names: dict[str, str] = {}
    for tensor in references(model):
        file = place_of(tensor)["location"]
        if file not in names:
            names[file] = f"{len(names)}-{WEIGHTS}" if names else WEIGHTS
            if not (path.parent / names[file]).exists():
                shutil.copyfile(file, path.parent / names[file])
    path.write_bytes(_with_locations(model, names).SerializeToString(deterministic=True))


def read_graph(path: Path) -> onnx.ModelProto:
    """Reads a graph of a verified bundle."""
    model = onnx.load_model_from_string(path.read_bytes())
    return _with_locations(model, {name: str(path.parent.absolute() / name) for name in data_files(model)})


def data_files(model: onnx.ModelProto) -> list[str]:
    """Returns the files that a graph refers to, each once."""
    return list(dict.fromkeys(place_of(tensor)["location"] for tensor in references(model)))


def _with_locations(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Returns the graph with other names of its files: a copy, unless it refers to none."""
    if not names:
        return model
    named = deepcopy(model)
    for tensor in references(named):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = names[entry.value]
    return named
