"""dataset.json: what a dataset folder holds. The rows are in shards.py's files, the fitted features in features.json.

dataset.json  features.json  statistics.json  golden.parquet  lookups/<table>.parquet  <split>/part-00000/...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from serin.formats.csv_format import CsvFormat
from serin.formats.schema import DType, InputColumn, Kind, Task, check_names
from serin.machine.documents import read_facts, write_facts
from serin.machine.typed_json import Document

FORMAT, VERSION = "serin.dataset", 1
FILE, FEATURES, STATISTICS, GOLDEN = "dataset.json", "features.json", "statistics.json", "golden.parquet"
SPLITS = ("train", "valid", "test")


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
class SourceFile(Document, omit=("csv", "snapshot", "declared")):
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
class DatasetDescription(Document, form="serin.dataset"):
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

    def __post_init__(self) -> None:
        check_names(self.inputs)


def write_dataset(folder: Path, description: DatasetDescription) -> None:
    write_facts(folder / FILE, description.to_json())


def read_dataset(path: Path | str) -> DatasetDescription:
    """The description of the dataset in this folder; BundleBroken when there is none that can be read."""
    return read_facts(Path(path) / FILE, DatasetDescription.from_json)
