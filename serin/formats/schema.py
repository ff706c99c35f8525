"""What a served model asks and answers: the columns of a request and the tensors of the reply (schema.json).

Every tensor has the batch first; `dims` are the others, as in Triton's configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serin.machine.documents import read_facts
from serin.machine.typed_json import Document, json2value

FILE = "schema.json"
ELEMENTS = b"serin.elements"  # metadata of a column: names of its lists' elements, or of its numbers, as JSON

DType = Literal[
    "BYTES", "BOOL", "FP16", "FP32", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"
]  # fmt: skip
Kind = Literal["string", "float", "int", "timestamp", "bool"]
Task = Literal["binary", "multiclass", "regression"]

DTYPE_OF_KIND: Mapping[str, DType] = {
    "string": "BYTES",
    "float": "FP32",
    "int": "INT64",
    "timestamp": "INT64",  # microseconds since 1970, UTC
    "bool": "INT8",
}
"""How a column of a model that Serin made travels."""
KIND_OF_DTYPE: Mapping[DType, Kind] = {
    "BYTES": "string", "BOOL": "bool", "FP16": "float", "FP32": "float", "FP64": "float",
    **dict.fromkeys(("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"), "int"),
}  # fmt: skip
"""What a column of a server elsewhere holds."""
ELSEWHERE, ONLINE = "elsewhere", "online"
INT64_NULL = -(2**63)
NULL_OF_KIND: Mapping[str, str] = {
    "string": '""',
    "float": "NaN",
    "int": str(INT64_NULL),
    "timestamp": str(INT64_NULL),
    "bool": "-1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumn(Document, omit=("null_texts", "window")):
    """One column a client sends. `null` says how a missing value is written, `null_texts` which strings the model takes
    for one as well. `dims`: of one row's value; a single one but for models with custom inputs, such as
    images. `source`: ELSEWHERE for a server that Serin does not run; ONLINE for a column that the gateway adds, which
    `window` defines. ValueError for a type that does not fit."""

    name: str
    dtype: DType
    kind: Kind
    source: str = "request"
    null: str = ""  # that of the kind
    dims: tuple[int, ...] = (1,)
    null_texts: tuple[str, ...] = ()
    window: str | None = None

    def __post_init__(self) -> None:
        ours = DTYPE_OF_KIND.get(self.kind) == self.dtype
        if not ours and (self.source != ELSEWHERE or KIND_OF_DTYPE.get(self.dtype) != self.kind):
            raise ValueError(f"column {self.name!r}: kind {self.kind!r} does not travel as {self.dtype}")
        object.__setattr__(self, "null", NULL_OF_KIND[self.kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    name: str
    dtype: DType
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema(Document, form="serin.schema"):
    """`classes`: the meaning of `label` and the order of `probabilities` in a multiclass model. `targets`: the order of
    `score`'s columns where there are several."""

    task: Task
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputTensor, ...]
    classes: tuple[str, ...] | None = None
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.inputs)


def check_names(inputs: Sequence[InputColumn]) -> None:
    """ValueError when two columns share a name."""
    if len({column.name for column in inputs}) != len(inputs):
        raise ValueError("two inputs have the same name")


def input_columns(entries: Sequence[Mapping[str, Any]]) -> tuple[InputColumn, ...]:
    """The columns that JSON entries describe; ValueError when two share a name or a type does not fit."""
    columns = json2value(tuple[InputColumn, ...], entries)
    check_names(columns)
    return columns


def outputs_of(task: Task, classes: int | None = None, targets: int = 1) -> tuple[OutputTensor, ...]:
    """What a model for `task` answers: with several targets a score for each."""
    if task != "multiclass":
        return (OutputTensor(name="score", dtype="FP32", dims=(targets,)),)
    assert classes is not None
    return (
        OutputTensor(name="label", dtype="INT64", dims=(1,)),
        OutputTensor(name="probabilities", dtype="FP32", dims=(classes,)),
    )


def write_schema(folder: Path, schema: Schema) -> None:
    (folder / FILE).write_text(
        json.dumps(schema.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )


def read_schema(folder: Path) -> Schema:
    return read_facts(folder / FILE, Schema.from_json)


def difference(live: Schema, new: Schema) -> str:
    """How requests to `new` must differ from those to `live`, or its answers from what clients of `live` expect; empty
    when they need not. Further answers do no harm."""
    before = {column.name: (column.dtype, column.dims) for column in live.inputs}
    after = {column.name: (column.dtype, column.dims) for column in new.inputs}
    windows = {column.name: column.window for column in new.inputs}
    defined = [
        column.name
        for column in live.inputs
        if column.name in after
        and before[column.name] == after[column.name]
        and column.window != windows[column.name]
    ]
    answers = {output.name: (output.dtype, output.dims) for output in new.outputs}
    changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    lost = [each.name for each in live.outputs if answers.get(each.name) != (each.dtype, each.dims)]
    parts = (
        ("it also asks for", after.keys() - before.keys()),
        ("it does not take", before.keys() - after.keys()),
        ("it takes another type for", changed),
        ("it has another window for", defined),
        ("it answers differently in", lost),
    )
    return ", ".join(f"{what} {', '.join(sorted(names))}" for what, names in parts if names)
