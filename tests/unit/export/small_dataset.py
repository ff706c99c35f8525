"""A small dataset with every kind of column, a lookup and nulls; and weights for it. Made by the real parts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from serin.columns.column import Column, column_from_arrow
from serin.columns.keys import lookup
from serin.export.build import export_model
from serin.features.fitted import Sample
from serin.features.plan import FeaturePlan
from serin.formats.dataset import (
    DatasetDescription,
    LookupDescription,
    SourceFile,
    SplitDescription,
    write_dataset,
)
from serin.formats.schema import DTYPE_OF_KIND, Kind, Task, input_columns
from serin.formats.shards import Rows
from serin.formats.weights import write_weights
from serin.models.build import build_model, load_model
from serin.models.shape import TableShape
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Dataset
from serin.store.store import Store
from tests.fakes.datasets import ShardWriter

ROWS = 400
INPUTS: dict[str, Kind] = {
    "carrier": "string",
    "distance": "float",
    "tailnum": "string",
    "dep": "timestamp",
    "stops": "int",
    "night": "bool",
    "num": "float",  # named as a tensor inside the graph is
}
KINDS: dict[str, Kind] = {**INPUTS, "seats": "int", "maker": "string"}
CLASSES = ("early", "on time", "late")


def spec_for(task: Task, **sections: dict) -> PipelineSpec:
    return load_spec(
        {
            "name": "flights",
            "data": {
                "tables": {"flights": "flights.parquet", "planes": "planes.parquet"},
                "joins": [
                    {"with": "planes", "on": "tailnum", "columns": ["seats", "maker"], "source": "lookup"}
                ],
                "target": {"expression": "arr_delay > 15", "task": task},
                "time": "dep",
            },
            "features": [
                {
                    "columns": ["distance", "seats"],
                    "steps": ["fill_median", {"clip": {"q": [0.01, 0.99]}}, "normalize"],
                },
                {"columns": ["num", "stops"], "steps": ["normalize"]},
                {"columns": ["carrier", "maker"], "steps": [{"categorify": {"min_count": 2}}]},
                {"columns": ["tailnum"], "steps": [{"categorify": {"buckets": 4, "max_size": 5}}]},
                {"columns": ["night"], "steps": ["categorify"]},
                {"columns": ["dep"], "steps": [{"date_parts": ["hour", "weekday"]}]},
            ],
            "model": {"hidden": [8]},
            **sections,
        }
    )


def flights(rows: int = ROWS) -> pa.Table:
    """Raw rows as a client has them, with nulls in every column."""
    random = np.random.default_rng(7)

    def holes(values: pa.Array) -> pa.Array:
        return pa.array(values.to_pylist(), type=values.type, mask=random.random(rows) < 0.1)

    times = random.integers(0, 2**31, rows).astype("datetime64[s]").astype("datetime64[us]")
    return pa.table(
        {
            "carrier": holes(
                pa.array(random.choice(["AA", "BB", "CÜ", "rare1"], rows, p=[0.5, 0.3, 0.199, 0.001]))
            ),
            "distance": holes(pa.array(random.normal(1000, 400, rows))),
            "tailnum": holes(pa.array([f"N{n}" for n in random.integers(0, 30, rows)])),
            "dep": holes(pa.array(times)),
            "stops": holes(pa.array(random.integers(0, 4, rows))),
            "night": holes(pa.array(random.random(rows) < 0.5)),
            "num": holes(pa.array(random.normal(0, 1e-3, rows), pa.float32())),
        }
    )


def planes() -> pa.Table:
    return pa.table(
        {
            "tailnum": [f"N{n}" for n in range(20)],
            "seats": [None if n == 3 else 10 * n for n in range(20)],
            "maker": ["Boeing" if n % 2 else "Airbus" for n in range(20)],
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    spec: PipelineSpec
    dataset: Dataset
    checkpoint: Checkpoint

    def logits(self, table: pa.Table) -> np.ndarray:
        """What the trained network says of raw rows, by way of the ETL's features: no ONNX anywhere."""
        plan = FeaturePlan.from_json(json.loads(Path(self.dataset.path, "features.json").read_text()))
        num, cat = plan.transform(columns_of(table))
        with torch.inference_mode():
            module = load_model(Path(self.checkpoint.path))
            return module(torch.from_numpy(num), torch.from_numpy(cat.astype(np.int64))).numpy()

    def export(self, store: Store | Path, lineage: Mapping[str, str] | None = None) -> Bundle:
        """A version in the store, or in a new one in a folder."""
        place = store if isinstance(store, Store) else Store(str(store / "store"))
        return export_model(self.spec, self.checkpoint, self.dataset, store=place, lineage=lineage or {})


def columns_of(table: pa.Table) -> dict[str, Column]:
    columns = {name: column_from_arrow(table.column(name), kind) for name, kind in INPUTS.items()}
    return columns | lookup(planes(), "tailnum", columns["tailnum"], ["seats", "maker"])


def make_dataset(folder: Path, task: Task) -> Dataset:
    columns = columns_of(flights())
    training = Sample(columns={name: column[:300] for name, column in columns.items()})
    plan = FeaturePlan.fit(
        spec_for(task).features,
        KINDS,
        lambda requests: [request.measure(training) for request in requests],
    )
    num, cat = plan.transform(columns)
    target = np.random.default_rng(3).integers(0, 3 if task == "multiclass" else 2, ROWS).astype(np.float32)
    everything = Rows(num=num, cat=cat, target=target, rows=np.arange(ROWS))
    splits = {"train": slice(0, 300), "valid": slice(300, 340), "test": slice(340, ROWS)}
    for split, rows in splits.items():
        writer = ShardWriter(folder / split, plan.numeric, [c.name for c in plan.categorical])
        writer.write(everything[rows])
        writer.close()
    golden = {name: columns[name].to_wire() for name in INPUTS}
    golden |= {f"num__{name}": num[:, i] for i, name in enumerate(plan.numeric)}
    golden |= {f"cat__{column.name}": cat[:, i] for i, column in enumerate(plan.categorical)}
    golden |= {"target": target, "row": np.arange(ROWS)}
    pq.write_table(pa.table(golden).slice(250, 100), folder / "golden.parquet")
    (folder / "lookups").mkdir()
    pq.write_table(planes(), folder / "lookups" / "planes.parquet")
    (folder / "features.json").write_text(json.dumps(plan.to_json()))
    description = DatasetDescription(
        task=task,
        target="arr_delay > 15",
        numeric=plan.numeric,
        categorical=plan.categorical,
        classes=CLASSES if task == "multiclass" else None,
        splits={name: SplitDescription(rows=len(everything[rows]), parts=1) for name, rows in splits.items()},
        inputs=input_columns([{"name": n, "kind": k, "dtype": DTYPE_OF_KIND[k]} for n, k in INPUTS.items()]),
        lookups=(
            LookupDescription(
                name="planes",
                key="tailnum",
                columns={"seats": "INT64", "maker": "BYTES"},
                file="lookups/planes.parquet",
            ),
        ),
        sources=(SourceFile(table="flights", path="flights.parquet", size=1, modified="0"),),
        digest="ab" * 32,
        dropped={"target is null": 3},
    )
    write_dataset(folder, description)
    return Dataset(path=str(folder), digest=description.digest, rows=description.rows)


def make_trained(folder: Path, task: Task, **sections: dict) -> Trained:
    (folder / "dataset").mkdir(parents=True)
    (folder / "result").mkdir()
    dataset = make_dataset(folder / "dataset", task)
    spec = spec_for(task, **sections)
    plan = FeaturePlan.from_json(json.loads((folder / "dataset" / "features.json").read_text()))
    sizes = tuple(column.size for column in plan.categorical)
    shape = TableShape(numeric=len(plan.numeric), sizes=sizes, outputs=3 if task == "multiclass" else 1)
    torch.manual_seed(5)
    module = build_model(spec.model, shape)
    record = {
        "model": spec.model,
        "shape": {"numeric": shape.numeric, "sizes": shape.sizes, "outputs": shape.outputs},
        "task": task,
    }
    write_weights(folder / "result", module.state_dict(), record)
    checkpoint = Checkpoint(path=str(folder / "result"), step=12, metrics={"valid_auc": 0.5})
    return Trained(spec=spec, dataset=dataset, checkpoint=checkpoint)
