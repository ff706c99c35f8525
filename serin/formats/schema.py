"""What a served model asks and answers: the columns of a request and the tensors of the reply (schema.json).

Every tensor has the batch first; `dims` are the others, as in Triton's configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from serin.errors import BundleBroken

FORMAT, VERSION = "serin.schema", 1
FILE = "schema.json"
ELEMENTS = b"serin.elements"  # metadata of a column: names of its lists' elements, or of its numbers, as JSON

DType = Literal["BYTES", "FP32", "INT64", "INT8"]
Kind = Literal["string", "float", "int", "timestamp", "bool"]
Task = Literal["binary", "multiclass", "regression"]

DTYPE_OF_KIND: Mapping[str, DType] = {
    "string": "BYTES",
    "float": "FP32",
    "int": "INT64",
    "timestamp": "INT64",  # microseconds since 1970, UTC
    "bool": "INT8",
}
INT64_NULL = -(2**63)
NULL_OF_KIND: Mapping[str, str] = {
    "string": '""',
    "float": "NaN",
    "int": str(INT64_NULL),
    "timestamp": str(INT64_NULL),
    "bool": "-1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumn:
    """One column a client sends. `null` says how a missing value is written, `null_texts` which strings the model takes
    for one as well. `dims`: of one row's value; a single one but for models with custom inputs, such as
    images."""

    name: str
    dtype: DType
    kind: Kind
    source: str = "request"
    null: str
    dims: tuple[int, ...] = (1,)
    null_texts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        if not self.null_texts:
            del document["null_texts"]
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    name: str
    dtype: DType
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """`classes`: the meaning of `label` and the order of `probabilities` in a multiclass model. `targets`: the order of
    `score`'s columns where there are several."""

    task: Task
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputTensor, ...]
    classes: tuple[str, ...] | None = None
    targets: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        document = {**asdict(self), "inputs": [column.to_json() for column in self.inputs]}
        return {"format": FORMAT, "version": VERSION, **document}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Schema:
        """The schema, or ValueError with what is wrong."""
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(f"not a {FORMAT} version {VERSION} document")
        task = document["task"]
        if task not in get_args(Task):
            raise ValueError(f"unknown task {task!r}")
        outputs = tuple(
            OutputTensor(name=entry["name"], dtype=_dtype(entry), dims=tuple(int(d) for d in entry["dims"]))
            for entry in document["outputs"]
        )
        classes = document.get("classes")
        return cls(
            task=task,
            inputs=input_columns(document["inputs"]),
            outputs=outputs,
            classes=None if classes is None else tuple(classes),
            targets=tuple(document.get("targets", ())),
        )


def input_columns(entries: Sequence[Mapping[str, Any]]) -> tuple[InputColumn, ...]:
    """The columns that JSON entries describe; ValueError when two share a name or a type does not fit."""
    columns = []
    for entry in entries:
        kind, dtype = entry["kind"], _dtype(entry)
        if DTYPE_OF_KIND.get(kind) != dtype:
            raise ValueError(f"column {entry['name']!r}: kind {kind!r} does not travel as {dtype}")
        columns.append(
            InputColumn(
                name=str(entry["name"]),
                dtype=dtype,
                kind=kind,
                source=entry.get("source", "request"),
                null=NULL_OF_KIND[kind],
                dims=tuple(int(size) for size in entry.get("dims", (1,))),
                null_texts=tuple(str(text) for text in entry.get("null_texts", ())),
            )
        )
    names = [column.name for column in columns]
    if len(set(names)) != len(names):
        raise ValueError("two inputs have the same name")
    return tuple(columns)


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
    path = folder / FILE
    try:
        return Schema.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error


def _dtype(entry: Mapping[str, Any]) -> DType:
    dtype: DType = entry["dtype"]
    if dtype not in get_args(DType):
        raise ValueError(f"{entry['name']!r}: unknown dtype {dtype!r}")
    return dtype


def difference(live: Schema, new: Schema) -> str:
    """How requests to `new` must differ from those to `live`, or its answers from what clients of `live` expect; empty
    when they need not. Further answers do no harm."""
    before = {column.name: (column.dtype, column.dims) for column in live.inputs}
    after = {column.name: (column.dtype, column.dims) for column in new.inputs}
    answers = {output.name: (output.dtype, output.dims) for output in new.outputs}
    changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    lost = [each.name for each in live.outputs if answers.get(each.name) != (each.dtype, each.dims)]
    parts = (
        ("it also asks for", after.keys() - before.keys()),
        ("it does not take", before.keys() - after.keys()),
        ("it takes another type for", changed),
        ("it answers differently in", lost),
    )
    return ", ".join(f"{what} {', '.join(sorted(names))}" for what, names in parts if names)
