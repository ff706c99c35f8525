"""Editions of a version's lookups: built from tables that have changed, proved, published, or refused."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.columns.column import column_from_arrow
from serin.columns.keys import lookup
from serin.errors import CheckFailed, GateFailed, JoinNotManyToOne, LookupRefused, SerinError, TableTooLarge
from serin.etl import lookups as etl_lookups
from serin.export import edition as export_edition
from serin.formats.bundle import read_golden, read_manifest, verify_bundle
from serin.formats.external_data import read_graph
from serin.formats.lookups import read_lookups
from serin.formats.schema import read_schema
from serin.formats.wire import to_wire
from serin.pipeline.lookups import find_or_publish, lookup_ages
from serin.scoring.predict import Scorer
from serin.scoring.session import FrontAndCore, open_session, run_in_batches
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from tests.kit.commands import run
from tests.unit.export.small_dataset import flights, make_trained, planes, spec_for

Change = Callable[[pa.Table], pa.Table]


@dataclass
class Scene:
    store: Store
    base: Bundle
    table: Path
    live: Release

    def change(self, change: Change) -> None:
        pq.write_table(change(planes()), self.table)

    def refresh(self, max_row_change: float | None = None) -> Bundle:
        return find_or_publish(self.store, self.base, self.live, max_row_change=max_row_change)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    table = tmp_path / "planes.parquet"
    data = spec_for("binary").data.model_dump(by_alias=True, mode="json", exclude_none=True)
    data["tables"] = {"flights": str(tmp_path / "flights.parquet"), "planes": str(table)}
    data["joins"][0]["lookup"] = {"max_age": "1d", "max_row_change": 0.5}
    data["checks"] = [{"column": "seats", "min": 0, "max": 900}]
    trained = make_trained(tmp_path / "trained", "binary", data=data)
    store = Store(str(tmp_path / "store"))
    base = trained.export(store)
    pq.write_table(planes(), table)
    return Scene(store=store, base=base, table=table, live=base.release)


def with_seats(table: pa.Table, **seats: int | None) -> pa.Table:
    """The table with other seats of some planes; unknown ones are added."""
    rows = {name: dict(row) for row in table.to_pylist() for name in [row["tailnum"]]}
    for name, count in seats.items():
        rows[name] = {"tailnum": name, "seats": count, "maker": "Boeing"}
    return pa.Table.from_pylist(list(rows.values()), schema=table.schema)


def test_an_edition_answers_with_the_new_table_and_as_before_without_it(scene: Scene) -> None:
    rows = flights(200)
    before = Scorer(scene.base.path).answers(rows)["score"]
    scene.change(lambda table: with_seats(table, N1=750, N25=300))
    edition = scene.refresh()
    assert (edition.release.name, edition.edition) == ("flights-v1e2", 2)
    assert scene.store.editions("flights", 1) == [1, 2]
    assert scene.store.versions("flights") == [1]
    after = Scorer(edition.path).answers(rows)["score"]
    asked = np.isin(np.array(rows.column("tailnum").to_pylist(), dtype=object), ["N1", "N25"])
    assert asked.any()
    assert (after[asked] != before[asked]).any()
    np.testing.assert_array_equal(after[~asked], before[~asked])
    manifest = verify_bundle(Path(edition.path), digest=edition.digest)
    assert manifest.release == edition.release
    assert manifest.lineage["edition"]["rows"] == {"planes": 21}
    known = read_lookups(Path(edition.path))
    assert known is not None
    assert known.rows == {"planes": 21}


def test_the_features_of_an_edition_are_those_of_the_etl_with_the_new_table(scene: Scene) -> None:
    """The golden rows ask for the keys that changed, and have what a join with the new table gives."""
    scene.change(lambda table: with_seats(table, N1=750, N25=300).slice(1))  # without N0
    edition = scene.refresh()
    golden, old = read_golden(Path(edition.path)), read_golden(Path(scene.base.path))
    asked = golden.inputs["tailnum"][len(old) :, 0].tolist()
    assert {b"N1", b"N25", b"N0"} >= {name if isinstance(name, bytes) else name.encode() for name in asked}
    assert len(asked) == 3
    table = pq.read_table(Path(edition.path) / "golden.parquet")
    seats = lookup(
        pq.read_table(scene.table), "tailnum", column_from_arrow(table.column("tailnum"), "string"), ["seats"]
    )["seats"]
    numbers = table.column("num__seats").to_numpy()
    present = ~seats.null
    feature_of = dict(zip(seats.values[present].tolist(), numbers[present].tolist(), strict=True))
    assert len(set(feature_of.values())) > 3
    assert [feature_of[count] for count in seats.values[present].tolist()] == numbers[present].tolist()


def test_a_table_that_has_not_changed_is_noted_as_read_and_makes_no_edition(scene: Scene) -> None:
    assert scene.refresh().release == scene.live
    assert scene.store.editions("flights", 1) == [1]
    (age,) = lookup_ages(scene.store, scene.live)
    noted = scene.store.lookups_read(scene.live)
    assert noted is not None
    assert age.read == noted
    assert not age.is_too_old(noted + 86_000)
    assert age.is_too_old(noted + 87_000)


def test_an_edition_that_was_published_before_a_crash_is_found_again(scene: Scene) -> None:
    scene.change(lambda table: with_seats(table, N1=750))
    first = scene.refresh()
    again = scene.refresh()
    assert again == first
    scene.change(lambda table: table)  # back to the table of the export
    assert scene.refresh().release == scene.base.release


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda table: table.drop_columns(["seats"]), LookupRefused, "column 'seats' is missing"),
        (
            lambda table: table.set_column(1, "seats", table.column("seats").cast(pa.string())),
            LookupRefused,
            "column 'seats' is of type string; it was int",
        ),
        (lambda table: with_seats(table, N1=901), CheckFailed, "column 'seats' breaks min: 0, max: 900"),
        (lambda table: pa.concat_tables([table, table.slice(0, 1)]), JoinNotManyToOne, "N0"),
        (
            lambda table: table.slice(0, 9),
            LookupRefused,
            "it has 9 rows, 20 before, and max_row_change is 0.5",
        ),
    ],
)
def test_a_bad_table_is_refused_and_nothing_is_published(
    scene: Scene, change: Change, error: type[SerinError], words: str
) -> None:
    scene.change(change)
    with pytest.raises(error, match=words):
        scene.refresh()
    assert scene.store.editions("flights", 1) == [1]
    assert scene.store.lookups_read(scene.live) is None


@pytest.mark.parametrize(("name", "value"), [("available_bytes", lambda: 4096), ("_GRAPH_BYTES", 100)])
def test_a_table_that_is_too_large_for_the_memory_or_the_graph_is_refused_by_name(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    scene.change(lambda table: with_seats(table, N1=750))
    monkeypatch.setattr(etl_lookups, name, value)
    with pytest.raises(TableTooLarge, match=r"planes.*name fewer columns"):
        scene.refresh()
    assert scene.store.editions("flights", 1) == [1]


def test_a_larger_change_of_rows_may_be_allowed(scene: Scene) -> None:
    scene.change(lambda table: table.slice(0, 9))
    assert scene.refresh(max_row_change=0.9).edition == 2


def test_a_graph_with_another_table_than_the_etl_had_is_not_published(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.change(lambda table: with_seats(table, N1=750))
    written = etl_lookups.golden_again

    def other(*given: object) -> pa.Table:
        pq.write_table(
            with_seats(planes(), N1=10), next(scene.store.workspace_parent().rglob("planes.parquet"))
        )
        return written(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(etl_lookups, "golden_again", other)
    with pytest.raises(GateFailed, match="'seats' differs"):
        scene.refresh()
    assert scene.store.editions("flights", 1) == [1]


def test_a_graph_of_other_features_is_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    made = export_edition.features2onnx

    def other(plan: object, served: object, folder: Path) -> object:
        graph = made(plan, served, folder)  # type: ignore[arg-type]
        graph.model.graph.node[-1].op_type = "Identity"
        return graph

    scene.change(lambda table: with_seats(table, N1=750))
    monkeypatch.setattr(export_edition, "features2onnx", other)
    with pytest.raises(SerinError, match="another version of Serin has built the features"):
        scene.refresh()


def test_a_version_without_lookups_json_is_refused_by_name(scene: Scene) -> None:
    Path(scene.base.path, "lookups.json").unlink()
    with pytest.raises(LookupRefused, match="has no lookups that can be refreshed"):
        scene.refresh()


def test_files_of_another_edition_are_not_taken_for_this_one(scene: Scene) -> None:
    scene.change(lambda table: with_seats(table, N1=750))
    edition = Path(scene.refresh().path)
    edition.rename(edition.with_name("1e7"))
    with pytest.raises(SerinError, match="it contains flights version 1e2, not flights version 1e7"):
        scene.store.bundle("flights", "1e7")
    assert read_manifest(edition.with_name("1e7")).edition == 2


STEPS = (
    "serin.etl.lookups:load_join",
    "serin.etl.lookups:golden_again",
    "serin.store.store:Store.reserve_edition",
    "serin.export.edition:check_features",
    "serin.export.publish:sign_if_configured",
    "serin.store.places:sync",
)


def test_a_refresh_that_is_killed_at_any_step_leaves_no_half_edition_and_can_be_repeated(
    scene: Scene, tmp_path: Path
) -> None:
    scene.change(lambda table: with_seats(table, N1=750))
    variables = {**os.environ, "SERIN_HOME": str(tmp_path / "home")}
    command = (sys.executable, "-m", "tests.unit.pipeline.killed_refresh", scene.store.url, "flights", *STEPS)
    said = run(*command, env=variables).stdout.splitlines()
    assert said == [f"{step} True [1]" for step in STEPS]
    assert scene.store.aliased("flights") == {}
    edition = scene.refresh()
    verify_bundle(Path(edition.path), digest=edition.digest)
    assert scene.store.editions("flights", 1) == [1, edition.edition]
    assert edition.edition > 2, "a number that was given out is not given out again"
    assert scene.refresh() == edition


def test_front_and_core_of_an_edition_answer_as_its_whole_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    data = spec_for("binary").data.model_dump(by_alias=True, mode="json", exclude_none=True)
    table = tmp_path / "planes.parquet"
    data["tables"] = {"flights": str(tmp_path / "flights.parquet"), "planes": str(table)}
    store = Store(str(tmp_path / "store"))
    base = make_trained(tmp_path / "trained", "binary", data=data, export={"target": "gpu"}).export(store)
    pq.write_table(with_seats(planes(), N1=750), table)
    folder = Path(find_or_publish(store, base, base.release).path)
    front, core, whole = (open_session(folder / name) for name in ("front.onnx", "core.onnx", "model.onnx"))
    wire = to_wire(flights(200), read_schema(folder))
    found, wanted = (
        run_in_batches(each, wire, ["score"], 200)["score"] for each in (FrontAndCore(front, core), whole)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    for name in ("front.onnx", "model.onnx"):
        properties = {each.key: each.value for each in read_graph(folder / name).metadata_props}
        assert properties["edition"] == "2"
