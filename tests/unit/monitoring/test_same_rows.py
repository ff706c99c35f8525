"""The rows of training, sent as traffic, are no drift: ETL, requests, records and bulk scoring agree on nulls."""

import csv
import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pytest
import yaml

from serin.columns.bins import bin_codes, count_rows
from serin.draft.guess import draft_table
from serin.etl.build import build_dataset
from serin.etl.raw_rows import read_training_rows
from serin.export.drift.build import make_statistics
from serin.export.drift.choose_bins import Source
from serin.formats.captures import column_names
from serin.formats.dataset import read_dataset
from serin.formats.rows import read_rows
from serin.formats.schema import Schema, outputs_of
from serin.formats.wire import TrainingRows, to_wire
from serin.monitoring.capture.bulk import BulkRecords
from serin.monitoring.capture.columns import block_rows
from serin.monitoring.capture.read import captured
from serin.monitoring.drift.detector import DriftDetector
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.monitoring import CaptureSpec, DriftSpec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from tests.fakes.awkward_tables import write_awkward_tables, write_awkward_variants
from tests.fakes.ugly_csv import TARGET, write_ugly_csv
from tests.kit.decoding import built_decoder
from tests.kit.rings import Exchange, binary_body, json_answer

RELEASE = Release(model="awkward", version=1)
_CELLS = ("a", "b", "N/A", "?", "", "NA", "nan", " ", "-", "None", "7")
_NULLS = {
    "everywhere": {"null_values": ["N/A", "?", "-"]},
    "per_column": {"null_values": {"town": ["N/A", "None"], "stage": ["7"], "size": ["-"], "day": ["?"]}},
    "none": {"delimiter": ","},
}


def write_null_tables(folder: Path, rows: int = 900) -> dict[str, PipelineSpec]:
    """A CSV file whose columns of every kind hold texts that may mean null, read with different `null_values`."""
    draw = np.random.default_rng(5)
    folder.mkdir(parents=True)
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["town", "stage", "size", "day", "flag", "y"])
        for row in range(rows):
            day = f"2026-01-{row % 28 + 1:02d}" if row % 7 else "?"
            size = f"{draw.integers(100)}" if row % 5 else "-"
            town, stage = draw.choice(_CELLS), draw.choice(_CELLS)
            writer.writerow([town, stage, size, day, "true" if row % 3 else "N/A", row % 2])
    steps = [
        {"columns": ["city", "stage"], "steps": ["categorify"]},
        {"columns": ["size"], "steps": ["fill_median"]},
        {"columns": ["day"], "steps": [{"date_parts": ["weekday"]}]},
        {"columns": ["flag"], "steps": ["categorify"]},
    ]
    found = {}
    for name, options in _NULLS.items():
        texts = ("size", "day") if name == "none" else ()  # without them `-` is no number and `?` no time
        served = [each for each in steps if each["columns"][0] not in texts]
        data = {
            "tables": {"main": {"path": str(folder / "t.csv"), **options}},
            "rename": {"main": {"town": "city"}},
            "target": {"expression": "y == 1", "task": "binary"},
        }
        found[f"nulls_{name}"] = load_spec({"name": "awkward", "data": data, "features": served})
    return found


@lru_cache(maxsize=1)
def awkward_specs(folder: Path) -> MappingProxyType[str, PipelineSpec]:
    write_ugly_csv(folder / "ugly.csv", 1500)
    (folder / "ugly.yaml").write_text(
        draft_table(folder / "ugly.csv", TARGET, path_in_spec="ugly.csv").text, encoding="utf-8"
    )
    specs = {
        "plain": write_awkward_tables(folder / "plain", 900),
        **write_awkward_variants(folder / "tables", 900),
        **write_null_tables(folder / "nulls"),
        "ugly": load_spec(folder / "ugly.yaml"),
    }
    return MappingProxyType(specs)


AWKWARD = (
    "plain", "derived", "joined", "other_names", "known", "classes", "texts", "groups", "windows", "spans", "own",
    "nulls_everywhere", "nulls_per_column", "nulls_none", "ugly",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same-rows")


def test_every_awkward_table_is_walked(folder: Path) -> None:
    assert tuple(awkward_specs(folder)) == AWKWARD


@pytest.mark.parametrize("name", AWKWARD)
def test_the_rows_of_training_are_no_drift_when_they_come_as_traffic(
    name: str, folder: Path, tmp_path: Path
) -> None:
    spec = awkward_specs(folder)[name]
    store = Store(str(tmp_path / "store"))
    dataset = build_dataset(spec.data, spec.features, EtlSpec(engine="process"), store=store)
    training = read_training_rows(spec.data, spec.features, dataset, max_rows=100_000)
    schema = Schema(
        task="binary", inputs=read_dataset(Path(dataset.path)).inputs, outputs=outputs_of("binary")
    )
    ways = {
        "requests": recorded_requests(schema, training),
        "bulk": recorded_in_bulk(schema, training, tmp_path),
    }
    sources = [Source(name=each.name, field=each.name, source="request") for each in schema.inputs]
    statistics = make_statistics(
        training, sources, segments=(), spec=DriftSpec(tolerance=0.05), importance={}
    )
    own = column_names([column.name for column in schema.inputs])
    for way, table in ways.items():
        table = table.rename_columns([{b: a for a, b in own.items()}.get(n, n) for n in table.column_names])
        for column in statistics.columns:
            expected, found = bin_codes(column, training.table), bin_codes(column, table)
            np.testing.assert_array_equal(found, expected, err_msg=f"{column.name} as {way}")
        counts = count_rows(statistics, table, np.zeros(table.num_rows))
        assert DriftDetector(statistics).observe(counts.starts, counts.counts).alarms == ()


def bundle_of(path: Path, spec: PipelineSpec) -> Bundle:
    path.mkdir()
    document = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["monitoring"] = {"capture": {"share": 1}}
    (path / "spec.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return Bundle(path=str(path), model=RELEASE.model, version=1, digest="")


def recorded_requests(schema: Schema, rows: TrainingRows) -> pa.Table:
    """The rows as clients send them, with every text that means null, as the recorder keeps them."""
    naive = replace(schema, inputs=tuple(replace(column, null_texts=()) for column in schema.inputs))
    wire = to_wire(with_null_texts(rows.table, schema), naive)
    sent = {
        each.name: (each.dtype, wire[each.name].shape, wire[each.name].ravel().tolist())
        for each in schema.inputs
    }
    request, length = binary_body("inputs", sent)
    answer = json_answer({"score": ("FP32", (len(rows), 1), [0.0] * len(rows))})
    entry = Exchange(request=request, answer=answer, t=0.0, request_json=length).encode()
    kept = ctypes.create_string_buffer(entry, len(entry))
    block = built_decoder()(schema, (), [ctypes.addressof(kept)])
    return block_rows(RELEASE.name, schema, block)


def recorded_in_bulk(schema: Schema, rows: TrainingRows, home: Path) -> pa.Table:
    records = BulkRecords(home, RELEASE, schema, CaptureSpec(share=1))
    scored = with_null_texts(rows.table, schema).append_column("score", pa.array(np.zeros(len(rows))))
    records.add(scored, 0)
    records.finish()
    return captured(home, RELEASE.model)


def with_null_texts(table: pa.Table, schema: Schema) -> pa.Table:
    """The nulls of each column of strings, written in turn in every way that means null there."""
    for column in schema.inputs:
        if column.kind == "string":
            ways = ["", None, *column.null_texts]
            texts = list(_turned(table.column(column.name).to_pylist(), ways))
            place = table.column_names.index(column.name)
            table = table.set_column(place, column.name, pa.array(texts, pa.string()))
    return table


def _turned(values: list[str | None], ways: list[str | None]) -> Iterator[str | None]:
    for place, value in enumerate(values):
        yield ways[place % len(ways)] if value is None else value


def test_a_file_to_be_scored_has_the_nulls_of_training(folder: Path, tmp_path: Path) -> None:
    for name in ("nulls_everywhere", "nulls_per_column", "nulls_none"):
        spec = awkward_specs(folder)[name]
        dataset = build_dataset(
            spec.data, spec.features, EtlSpec(engine="process"), store=Store(str(tmp_path / "store"))
        )
        description = read_dataset(Path(dataset.path))
        schema = Schema(task="binary", inputs=description.inputs, outputs=outputs_of("binary"))
        bundle = bundle_of(tmp_path / name, spec)
        pieces = list(read_rows(folder / "nulls" / "t.csv", schema, Path(bundle.path)))
        wire = to_wire(pa.concat_tables(pieces), schema)
        with (folder / "nulls" / "t.csv").open(newline="") as file:
            cells = list(csv.DictReader(file))
        for column in schema.inputs:
            if column.kind != "string":
                continue
            stored = {"city": "town"}.get(column.name, column.name)
            void = {"", *spec.data.null_texts("main", column.name)}
            expected = ["" if row[stored] in void else row[stored] for row in cells]
            assert wire[column.name].ravel().tolist() == expected, (name, column.name)
