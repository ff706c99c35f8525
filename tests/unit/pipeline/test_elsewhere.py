"""Servers that Serin does not run become versions: what they say about themselves, and what is watched of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from serin.errors import RolloutRefused, RowsUnfit, ServedElsewhere, SpecError
from serin.formats.drift import read_drift
from serin.formats.quality import read_quality_reference
from serin.formats.schema import ELSEWHERE, KIND_OF_DTYPE, DType, InputColumn, read_schema
from serin.formats.serving.recorded import NUMBERS
from serin.formats.wire import wire_column
from serin.scoring.predict import Scorer
from serin.serving.external import External, recordable
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store
from serin.watcher.capture_duty import capture_plans
from tests.fakes.kserve import KServe
from tests.kit.elsewhere import register
from tests.kit.web import in_a_thread
from tests.unit.serving import bundles

MODEL = "flights"
RECORDED = {"capture": {"share": 1}}


def tensor(name: str, dtype: str = "FP32", *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": dtype, "shape": list(shape or (-1, 1))}


TENSORS = {
    "inputs": [tensor("carrier", "BYTES"), tensor("distance", "FP64"), tensor("stops", "UINT16")],
    "outputs": [tensor("chance")],
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def server() -> Iterator[KServe]:
    made = KServe(model=MODEL, tensors=TENSORS)
    with in_a_thread(made):
        yield made


def place_of(server: KServe) -> Endpoint:
    return Endpoint(http=server.address, grpc=server.address, elsewhere=True)


NOBODY = Endpoint(http="127.0.0.1:1", grpc="127.0.0.1:1", elsewhere=True)


def written(folder: Path, **sections: Any) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def folder_of(store: Store, release: Release) -> Path:
    return Path(store.bundle(release.model, release.version).path)


@pytest.mark.parametrize("dtype", KIND_OF_DTYPE)
def test_each_type_of_the_protocol_becomes_a_column(dtype: str) -> None:
    shapes = {"inputs": {"a": (dtype, (-1,)), "b": (dtype, (-1, 2, 3))}, "outputs": {"y": (dtype, (-1, 4))}}
    (a, b), (y,), wrong = recordable(shapes, ())
    assert (a.dtype, a.kind, a.dims, b.dims, y.dims, wrong) == (
        dtype,
        KIND_OF_DTYPE[a.dtype],
        (1,),
        (2, 3),
        (4,),
        [],
    )


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        ("BF16", (-1, 1), "type BF16, which is not recorded"),
        ("COMPLEX", (-1, 1), "type COMPLEX, which is not recorded"),
        ("FP32", (), r"shape \[\]"),
        ("FP32", (3, 224), r"shape \[3, 224\]"),
        ("FP32", (-1, -1), r"shape \[-1, -1\]"),
    ],
)
def test_another_type_or_shape_is_refused_by_name_unless_it_is_left_out(
    store: Store, tmp_path: Path, dtype: str, shape: tuple[int, ...], reason: str
) -> None:
    odd = {"name": "odd", "datatype": dtype, "shape": list(shape)}
    made = KServe(model=MODEL, tensors={**TENSORS, "inputs": [*TENSORS["inputs"], odd]})
    with in_a_thread(made):
        with pytest.raises(
            SpecError, match=f"monitoring.capture: input 'odd' has the {reason}.*capture.drop"
        ):
            register(store, MODEL, place_of(made), spec=written(tmp_path, monitoring=RECORDED))
        dropped = {"capture": {"share": 1, "drop": ["odd"]}}
        found = register(store, MODEL, place_of(made), spec=written(tmp_path, monitoring=dropped))
        assert [each.name for each in read_schema(folder_of(store, found)).inputs] == [
            "carrier",
            "distance",
            "stops",
        ]
        assert register(store, MODEL, place_of(made), spec=written(tmp_path)).version == 2, (
            "nothing is recorded"
        )


def test_the_recorder_finds_types_and_masks_from_the_first_row_on(
    store: Store, server: KServe, tmp_path: Path
) -> None:
    masked = {"capture": {"share": 1, "mask": ["carrier"]}}
    release = register(store, MODEL, place_of(server), spec=written(tmp_path, monitoring=masked))
    plan = capture_plans(store)(release)
    assert plan is not None
    assert plan.settings.mask == ("carrier",)
    assert [(each.name, each.dtype, each.kind) for each in plan.schema.inputs] == [
        ("carrier", "BYTES", "string"), ("distance", "FP64", "float"), ("stops", "UINT16", "int"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "values", "refused"),
    [
        ("UINT16", [0, 65535], [-1, None, 65536]), ("INT8", [-128, 127], [128, None]), ("BOOL", [True, False], [None]),
        ("FP64", [0.5, None], []), ("FP16", [0.5, None], []), ("INT64", [1, None], []),
    ],
)  # fmt: skip
def test_rows_are_sent_in_the_server_s_types_and_what_does_not_fit_is_refused(
    dtype: DType, values: list[Any], refused: list[Any]
) -> None:
    column = InputColumn(name="x", dtype=dtype, kind=KIND_OF_DTYPE[dtype], source=ELSEWHERE)
    sent = wire_column(pa.chunked_array([values]), column)
    assert sent.dtype == np.dtype(NUMBERS[dtype])
    assert sent.shape == (2, 1)
    assert sent[0, 0] == values[0]
    for bad in refused:
        with pytest.raises(RowsUnfit, match=f"not a {dtype}"):
            wire_column(pa.chunked_array([[values[0], bad]]), column)


def test_without_a_spec_nothing_is_recorded(store: Store, server: KServe) -> None:
    plan = capture_plans(store)(register(store, MODEL, place_of(server)))
    assert plan is not None
    assert plan.settings.share == 0


def test_records_need_a_server_that_answers(store: Store, tmp_path: Path) -> None:
    spec = written(tmp_path, monitoring=RECORDED)
    with pytest.raises(
        SpecError, match=r"monitoring.capture: needs the types .*http://127.0.0.1:1/v2/models/flights"
    ):
        register(store, MODEL, NOBODY, spec=spec)
    assert store.versions(MODEL) == []


def test_an_address_with_other_settings_is_another_version(
    store: Store, server: KServe, tmp_path: Path
) -> None:
    plain, again = (register(store, MODEL, place_of(server)) for _ in range(2))
    recorded = register(store, MODEL, place_of(server), spec=written(tmp_path, monitoring=RECORDED))
    as_before = register(store, MODEL, place_of(server))
    assert [each.version for each in (plain, again, recorded, as_before)] == [1, 1, 2, 2]
    assert External(store).endpoint(plain) == External(store).endpoint(recorded) == place_of(server)


def test_a_model_that_serin_serves_is_not_taken_over(store: Store) -> None:
    bundles.publish(store, bias=0.0, model=MODEL)
    with pytest.raises(RolloutRefused, match="a model in the store has this name"):
        register(store, MODEL, NOBODY)


def reference(folder: Path, rows: int = 2000, **more: Any) -> Path:
    draw = np.random.default_rng(1)
    late = draw.random(rows) < 0.5
    columns = {
        "carrier": draw.choice(["AA", "UA"], rows), "distance": draw.normal(size=rows),
        "stops": draw.integers(0, 3, rows), "_answer_chance": np.where(late, 0.8, 0.2),
        "delay": np.where(late, 30.0, 0.0), **more,
    }  # fmt: skip
    path = folder / "reference.parquet"
    pq.write_table(pa.table({name: values for name, values in columns.items() if values is not None}), path)
    return path


WATCHED = {
    "data": {"target": {"expression": "delay > 15", "task": "binary"}},
    "monitoring": {**RECORDED, "drift": {"tolerance": 0.05}, "quality": {"margin": 0.02}},
}


def test_live_rows_are_compared_with_a_table(store: Store, server: KServe, tmp_path: Path) -> None:
    spec = written(tmp_path, **WATCHED)
    release = register(store, MODEL, place_of(server), spec=spec, reference=reference(tmp_path))
    statistics, quality = (read(folder_of(store, release)) for read in (read_drift, read_quality_reference))
    assert statistics is not None
    assert quality is not None
    assert [each.name for each in statistics.columns] == ["carrier", "distance", "stops", "chance"]
    assert quality.loss == pytest.approx(0.04)
    kept = register(store, MODEL, place_of(server), timeout_s=9.0)
    assert kept != release
    assert read_drift(folder_of(store, kept)) == statistics, "of the last version that watches the same"


def test_what_is_watched_needs_a_table(store: Store, server: KServe, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        register(store, MODEL, place_of(server), spec=written(tmp_path, **WATCHED))
    assert [key for key, _ in refused.value.problems] == ["monitoring.drift", "monitoring.quality"]
    assert "--reference" in str(refused.value)
    register(store, MODEL, place_of(server), spec=written(tmp_path, **WATCHED), reference=reference(tmp_path))
    other = {**WATCHED, "monitoring": {**WATCHED["monitoring"], "drift": {"tolerance": 0.2}}}
    with pytest.raises(SpecError, match=r"monitoring\.drift: needs rows to compare with"):
        register(store, MODEL, place_of(server), spec=written(tmp_path, **other))


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"stops": None}, "has no column 'stops'"),
        ({"stops": ["many"] * 2000}, "stops"),
        ({"_answer_chance": None}, "has no column _answer_chance"),
        ({"delay": None}, "delay"),
        ({"_source": ["bulk"] * 2000}, "no rows that a client sent"),
    ],
)
def test_a_table_that_cannot_be_compared_with_is_refused(
    store: Store, server: KServe, tmp_path: Path, table: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SpecError, match=f"--reference: .*{problem}"):
        register(
            store,
            MODEL,
            place_of(server),
            spec=written(tmp_path, **WATCHED),
            reference=reference(tmp_path, **table),
        )
    assert store.versions(MODEL) == []


def test_a_table_without_a_use_and_one_that_is_none_are_refused(
    store: Store, server: KServe, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=r"--reference: is for monitoring\.drift and monitoring\.quality"):
        register(store, MODEL, place_of(server), reference=reference(tmp_path))
    (tmp_path / "text").write_text("no table")
    with pytest.raises(SpecError, match="--reference: cannot be read as Parquet"):
        register(
            store, MODEL, place_of(server), spec=written(tmp_path, **WATCHED), reference=tmp_path / "text"
        )


@pytest.mark.parametrize(
    ("outputs", "data", "problem"),
    [
        ([tensor("a"), tensor("b")], WATCHED["data"], "'score' or the only one, of 1 numbers"),
        ([tensor("a", "FP32", -1, 2)], WATCHED["data"], r"answers with 'a' \(2\)"),
        ([tensor("a", "FP32", -1, 3)], {"target": {"column": "kind", "task": "multiclass"}}, "model.classes"),
    ],
)
def test_answers_that_labels_cannot_be_compared_with_are_refused(
    store: Store, tmp_path: Path, outputs: list[Any], data: dict[str, Any], problem: str
) -> None:
    made = KServe(model=MODEL, tensors={**TENSORS, "outputs": outputs})
    with in_a_thread(made), pytest.raises(SpecError, match=f"data.target: .*{problem}"):
        register(store, MODEL, place_of(made), spec=written(tmp_path, data=data, monitoring=RECORDED))


def test_what_needs_a_graph_says_that_there_is_none(store: Store) -> None:
    release = register(store, MODEL, NOBODY)
    with pytest.raises(ServedElsewhere, match="flights version 1, which is served elsewhere"):
        Scorer(folder_of(store, release))
