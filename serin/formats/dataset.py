"""dataset.json: what a dataset folder holds. The rows are in shards.py's files, the fitted features in features.json.

dataset.json  features.json  statistics.json  golden.parquet  lookups/<table>.parquet  <split>/part-00000/...
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from serin.errors import BundleBroken
from serin.formats.csv_format import CsvFormat
from serin.formats.schema import DType, InputColumn, Kind, Task, input_columns

FORMAT, VERSION = "serin.dataset", 1
FILE, FEATURES, STATISTICS, GOLDEN = "dataset.json", "features.json", "statistics.json", "golden.parquet"
SPLITS = ("train", "valid", "test")
_RARE = ("csv", "snapshot")  # keys of sources that are left out when they say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoricalColumn:
    """A column of codes; `size` counts all of them, null and out-of-vocabulary included."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDescription:
    rows: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupDescription:
    """A table that is served inside the model: `columns` (name -> wire type) by `key`, read from `file`."""

    name: str
    key: str
    columns: dict[str, DType]
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedDescription:
    """A column that the model calculates: an expression over columns of these kinds."""

    name: str
    expression: str
    kinds: dict[str, Kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a file is a part of: a version of the Delta table at `source`, or the rows of a query whose digest is
    `version`, read through the connection that `source` refers to."""

    kind: Literal["delta", "sql"]
    source: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file that was read, as it was then. `modified`: ns since 1970, or what an object store says. `content`: the
    digest or mark of its content, "" when none was requested or none is reliable. `partition`: columns that the file
    has by the key=value folders it is in, or by the snapshot. `csv`: how it is written, when the table's options say
    so. `declared`: the table's columns with their kinds, where a snapshot lists them; not in dataset.json."""

    table: str
    path: str
    size: int
    modified: str
    partition: tuple[tuple[str, str], ...] = ()
    content: str = ""
    csv: CsvFormat | None = None
    snapshot: Snapshot | None = None
    declared: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetDescription:
    """`target` is the target's expression; `targets` are the names of several. `dropped` counts rows left out, by
    reason. `split_kind`: how rows were assigned to splits, as data.split says; "" when it is not known."""

    task: Task
    target: str
    numeric: tuple[str, ...]
    categorical: tuple[CategoricalColumn, ...]
    classes: tuple[str, ...] | None
    splits: dict[str, SplitDescription]
    inputs: tuple[InputColumn, ...]
    lookups: tuple[LookupDescription, ...]
    sources: tuple[SourceFile, ...]
    digest: str
    dropped: dict[str, int] = field(default_factory=dict)
    derived: tuple[DerivedDescription, ...] = ()  # in the order in which they are calculated
    targets: tuple[str, ...] = ()
    split_kind: str = ""

    @property
    def outputs(self) -> int:
        """How many numbers a network answers with."""
        return len(self.classes or ()) if self.task == "multiclass" else len(self.targets) or 1

    @property
    def rows(self) -> dict[str, int]:
        return {name: split.rows for name, split in self.splits.items()}

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        document["inputs"] = [column.to_json() for column in self.inputs]
        document["sources"] = [
            {key: value for key, value in source.items() if key != "declared" and (value or key not in _RARE)}
            for source in document["sources"]
        ]
        return {"format": FORMAT, "version": VERSION, **document}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> DatasetDescription:
        """The description, or ValueError with what is wrong."""
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(f"not a {FORMAT} version {VERSION} document")
        task = document["task"]
        if task not in get_args(Task):
            raise ValueError(f"unknown task {task!r}")
        classes = document["classes"]
        return cls(
            task=task,
            target=document["target"],
            numeric=tuple(document["numeric"]),
            categorical=tuple(CategoricalColumn(**entry) for entry in document["categorical"]),
            classes=None if classes is None else tuple(classes),
            splits={name: SplitDescription(**entry) for name, entry in document["splits"].items()},
            inputs=input_columns(document["inputs"]),
            lookups=tuple(LookupDescription(**entry) for entry in document["lookups"]),
            sources=tuple(_source(entry) for entry in document["sources"]),
            digest=document["digest"],
            dropped=dict(document["dropped"]),
            derived=tuple(DerivedDescription(**entry) for entry in document.get("derived", ())),
            targets=tuple(document.get("targets", ())),
            split_kind=document.get("split_kind", ""),
        )


def _source(entry: Mapping[str, Any]) -> SourceFile:
    partition = tuple((str(key), str(value)) for key, value in entry.get("partition", ()))
    csv, snapshot = entry.get("csv"), entry.get("snapshot")
    known = {
        "partition": partition,
        "csv": None if csv is None else CsvFormat.from_json(csv),
        "snapshot": None if snapshot is None else Snapshot(**snapshot),
    }
    return SourceFile(**{**entry, **known})


def write_dataset(folder: Path, description: DatasetDescription) -> None:
    write_description(folder, description.to_json())


def write_description(folder: Path, document: Mapping[str, Any]) -> None:
    """Writes what `DatasetDescription.to_json` gives."""
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_dataset(path: Path | str) -> DatasetDescription:
    """The description of the dataset in this folder; BundleBroken when there is none that can be read."""
    file = Path(path) / FILE
    try:
        return DatasetDescription.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleBroken(path=str(file), reason=f"{type(error).__name__}: {error}") from error
