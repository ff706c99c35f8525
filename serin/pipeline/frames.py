"""Pandas at the edge of the stages: a frame kept as a table that stages read, and a dataset's split as a frame."""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from serin.errors import TableUnusable
from serin.features.plan import FeaturePlan
from serin.formats.dataset import FEATURES, SPLITS, DatasetDescription, read_dataset
from serin.formats.shards import Array, Rows, read_split
from serin.machine import environment
from serin.machine.durable import make_private, sync
from serin.store.runs import hold_input

if TYPE_CHECKING:
    import pandas as pd

    from serin.scoring.predict import Scorer


def keep_frame(frame: pd.DataFrame) -> Path:
    """A Parquet file with the frame's columns, under SERIN_HOME, named by its content: an equal frame is the same file.

    An index that has a name is a column too. TableUnusable for what a Parquet file cannot hold.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    home = environment.home()
    folder = make_private(make_private(home) / "tables")
    scratch = folder / f".{secrets.token_hex(6)}"
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
        pq.write_table(table, scratch, compression="zstd")
        with scratch.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        path = folder / f"{digest[:32]}.parquet"
        hold_input(home, path)
        if not path.exists():  # a file that is there keeps its time: datasets are found by it
            sync(scratch)
            scratch.replace(path)
            sync(folder)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise TableUnusable(
            table="the frame", problem=f"cannot be written as Parquet: {error}; convert or drop that column"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
    return path


def read_frame(dataset: Path, split: str) -> pd.DataFrame:
    """A split of a dataset, indexed by the rows' numbers in the main table: features as the model sees them, codes as
    the values they mean, then the target."""
    import pandas as pd

    if split not in SPLITS:
        raise ValueError(f"{split!r} is not a split: use one of {', '.join(SPLITS)}")
    description, rows = read_dataset(dataset), read_split(dataset, split).whole()
    plan = FeaturePlan.from_json(json.loads((dataset / FEATURES).read_text(encoding="utf-8")))
    columns: dict[str, object] = {name: rows.num[:, place] for place, name in enumerate(plan.numeric)}
    meanings = [
        (output.name, labels)
        for feature in plan.categories
        for output, labels in zip(feature.outputs, feature.step.labels(), strict=True)
    ]
    for place, (name, labels) in enumerate(meanings):
        columns[name] = _decoded(rows.cat[:, place], labels)
    return pd.DataFrame({**columns, **_targets(description, rows)}, index=pd.Index(rows.rows, name="row"))


def _decoded(codes: Array, labels: tuple[str, ...]) -> object:
    """The codes as categories; the first label is null's."""
    import pandas as pd

    names = list(labels[1:])
    if len(set(names)) < len(names):  # a value that reads like the name of another code
        return np.array([None, *names], dtype=object)[codes]
    return pd.Categorical.from_codes(codes - 1, categories=pd.Index(names))


def _targets(description: DatasetDescription, rows: Rows) -> dict[str, object]:
    if description.targets:
        return {name: rows.target[:, place] for place, name in enumerate(description.targets)}
    if description.classes is not None:
        return {"target": _decoded(rows.target.astype(np.int64) + 1, ("", *description.classes))}
    return {"target": rows.target.astype(np.int8) if description.task == "binary" else rows.target}


def answer_frame(scorer: Scorer, frame: pd.DataFrame) -> pd.DataFrame:
    """The model's outputs for the frame's rows, by its index. An output of several numbers becomes a column for each
    class or target; a label becomes the class that it means."""
    import pandas as pd

    schema, columns = scorer.schema, {}
    for name, values in scorer.answers(frame).items():
        flat = values.reshape(len(values), -1)
        if name == "label" and schema.classes is not None:
            columns[name] = np.array(schema.classes, dtype=object)[flat[:, 0]]
        elif flat.shape[1] == 1:
            columns[name] = flat[:, 0]
        else:
            meanings = schema.classes or schema.targets or tuple(map(str, range(flat.shape[1])))
            columns |= {f"{name}_{meaning}": flat[:, place] for place, meaning in enumerate(meanings)}
    return pd.DataFrame(columns, index=frame.index)
