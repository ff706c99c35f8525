"""The candidate against the live model, and its permutation importance, with real parts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.errors import ChampionRefused
from serin.etl.raw_rows import read_test_rows
from serin.export import explain
from serin.export.champion import _contest, meet_champion
from serin.export.explain import measure_importance
from serin.formats.bundle import verify_bundle
from serin.formats.champion import ChampionReport
from serin.formats.explain import FeatureColumns
from serin.formats.importance import FILE, read_importance
from serin.formats.schema import read_schema
from serin.formats.shards import read_split
from serin.machine.documents import write_facts
from serin.pipeline.run_stage import run_etl, run_export, run_train
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.fakes.datasets import make_dataset
from tests.fakes.small_pipeline import NAME, small_spec

LIVE_TIME = {"epochs": 3, "batch_rows": 64, "learning_rate": 0.02, "seed": 3}


def spec_of(folder: Path, **sections: dict) -> PipelineSpec:
    spec = small_spec(folder, rows=4000, training=LIVE_TIME, **sections)
    spec["data"]["split"] = {"train": 0.6, "valid": 0.1, "test": 0.3}
    return load_spec(spec)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    """A home with a live version."""
    home = tmp_path_factory.mktemp("champion")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIN_HOME", str(home))
        spec = spec_of(home / "data")
        run_train(spec)
        bundle = run_export(spec).value
        Store.open().set_alias(NAME, "live", bundle.version)
    return home, bundle


@pytest.fixture
def home(live: tuple[Path, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, for one test to spoil."""
    copy = tmp_path / "home"
    shutil.copytree(live[0], copy)
    monkeypatch.setenv("SERIN_HOME", str(copy))
    return copy


def retrain(spec: PipelineSpec) -> Bundle:
    run_train(spec)
    return run_export(spec).value


def shuffle_training_labels(folder: Path) -> None:
    """The labels of all rows but those that the test split will hold: by id the split is the same."""
    path = folder / "parcels.parquet"
    table = pq.read_table(path)
    hours = table.column("hours").to_numpy().copy()
    test = read_split(run_etl(spec_of(folder)).value.path, "test").whole().rows
    others = np.setdiff1d(np.arange(len(hours)), test)
    hours[others] = np.random.default_rng(5).permutation(hours[others])
    pq.write_table(table.set_column(table.column_names.index("hours"), "hours", pa.array(hours)), path)


def champion_of(bundle: Bundle) -> dict:
    return json.loads(Path(bundle.path, "champion.json").read_text())


def test_a_retrain_on_shuffled_labels_is_refused_unless_a_named_person_answers_for_it(home: Path) -> None:
    shuffle_training_labels(home / "data")
    spec = spec_of(home / "data")
    with pytest.raises(
        ChampionRefused, match=r"worse than the live version 1: overall auc 0\.\d+ against 0\.9"
    ):
        retrain(spec)
    assert Store.open().versions(NAME) == [1]
    bundle = run_export(spec, approved_by="ann").value
    assert bundle.version == 2, "the refused one took no number"
    report = champion_of(bundle)
    assert (report["verdict"], report["approved_by"], report["live_version"]) == ("approved", "ann", 1)
    assert report["overall"]["worse"]
    assert "`ann` approved it nevertheless" in Path(bundle.path, "card.md").read_text()


def test_another_good_training_passes_and_the_card_shows_both(home: Path) -> None:
    spec = spec_of(
        home / "data", export={"segments": ["carrier"]}, champion={"max_loss": 0.01, "confidence": 0.99}
    )
    bundle = run_export(spec).value
    report = champion_of(bundle)
    assert report["verdict"] == "better or equal"
    assert report["overall"]["rows"] == 1207
    assert list(report["segments"]) == ["carrier=swift", "carrier=steady"]
    assert report["overall"]["at_least"] <= report["overall"]["loss"] <= report["overall"]["at_most"]
    assert "carrier=swift" in Path(bundle.path, "card.md").read_text()
    verify_bundle(Path(bundle.path))


def meet(spec: PipelineSpec, bundle: Bundle) -> ChampionReport:
    """The champion check alone, with a candidate that nobody may ask."""
    dataset = run_etl(spec).value
    return meet_champion(
        spec,
        lambda _: pytest.fail("asked"),
        read_schema(Path(bundle.path)),
        store=Store.open(),
        read_rows=lambda features, most: read_test_rows(spec.data, features, dataset, max_rows=most),
    )


def test_a_changed_target_is_said_and_passed(home: Path, live: tuple[Path, Bundle]) -> None:
    changed = spec_of(home / "data").model_dump(mode="json", by_alias=True)
    changed["data"]["target"]["expression"] = "hours > 20"
    report = meet(load_spec(changed), live[1])
    assert report.verdict == "not compared"
    assert report.reason == "the target changed from 'hours > 30' (binary) to 'hours > 20' (binary)"


def test_a_live_model_that_cannot_be_compared_stops_the_candidate(home: Path) -> None:
    model = home / "store" / "models" / NAME / "versions" / "1" / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"\0")
    spec = spec_of(home / "data", champion={"max_loss": 0.01})  # another version than the live one
    with pytest.raises(
        ChampionRefused, match="cannot be compared with the live version 1: the live model cannot"
    ):
        run_export(spec)
    report = champion_of(run_export(spec, approved_by="bob").value)
    assert (report["verdict"], report["approved_by"], report["overall"]) == ("approved", "bob", None)


def test_a_live_model_of_another_format_stops_the_candidate(home: Path, live: tuple[Path, Bundle]) -> None:
    manifest = home / "store" / "models" / NAME / "versions" / "1" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 1}))
    with pytest.raises(
        ChampionRefused, match=r"cannot be compared with the live version 1: .* document of version 2"
    ):
        meet(spec_of(home / "data"), live[1])


def test_columns_that_the_live_model_needs_and_the_tables_lost_stop_the_candidate(
    home: Path, live: tuple[Path, Bundle]
) -> None:
    path = home / "data" / "parcels.parquet"
    pq.write_table(pq.read_table(path).drop_columns("weight"), path)
    spec = spec_of(home / "data").model_dump(mode="json", by_alias=True)
    spec["features"][0]["columns"] = ["distance"]
    with pytest.raises(ChampionRefused, match=r"tables no longer have the live model's columns: .*'weight'"):
        meet(load_spec(spec), live[1])


def test_the_newest_test_rows_come_back_as_requests_with_their_targets(home: Path) -> None:
    spec = spec_of(home / "data")
    dataset = run_etl(spec).value
    rows = read_test_rows(spec.data, spec.features, dataset, max_rows=150)
    table = pq.read_table(home / "data" / "parcels.parquet").take(pa.array(rows.row))
    assert len(rows) == 150
    assert rows.row.tolist() == sorted(read_split(dataset.path, "test").whole().rows)[-150:]
    assert rows.table.column("distance").to_pylist() == table.column("distance").to_pylist()
    assert rows.table.column("carrier").to_pylist() == table.column("carrier").to_pylist()
    np.testing.assert_array_equal(rows.target, table.column("hours").to_numpy() > 30)


def test_a_loss_counts_only_when_it_is_sure() -> None:
    random = np.random.default_rng(1)
    target = (random.random(2000) < 0.3).astype(np.float32)
    live = target + random.normal(0, 1, 2000)
    slightly = live + random.normal(0, 0.02, 2000)
    clearly = live + random.normal(0, 1, 2000)
    assert not _contest("auc", target, slightly, live, 0.0, 0.95).worse
    assert _contest("auc", target, clearly, live, 0.0, 0.95).worse
    assert not _contest("auc", target, clearly, live, 0.2, 0.95).worse
    assert not _contest("auc", target, live, clearly, 0.0, 0.95).worse
    assert _contest("rmse", target, clearly, live, 0.1, 0.95).worse


# Features a, b, c (numbers), d, e (codes). The target is a - 0.5 b (d > 3) + an effect of e; c says nothing.
COLUMNS = FeatureColumns(
    numeric=("raw", "b", "c"), categorical=("raw", "e"), sources=dict.fromkeys(("raw", "b", "c", "e"), "request")
)  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_dataset(tmp_path_factory.mktemp("dataset")).path)


def logits(num: np.ndarray, cat: np.ndarray) -> np.ndarray:
    """A model that knows the first number and the first code of the column `raw`, a little of b, nothing of c and e."""
    return (num[:, 0] - 0.5 * num[:, 1] * (cat[:, 0] > 3)).astype(np.float32)[:, None]


def test_a_column_is_as_important_as_what_the_model_loses_without_it(dataset: Path) -> None:
    found = measure_importance(logits, dataset, COLUMNS, "binary")
    losses = {each.column: each.loss for each in found.columns}
    assert [each.column for each in found.columns][:2] == ["raw", "b"]
    assert losses["raw"] > 3 * losses["b"] > 0
    assert losses["c"] == losses["e"] == 0
    assert all(each.low <= each.loss <= each.high for each in found.columns)
    assert (found.metric, found.rows, found.repeats) == ("auc", 800, 5)
    assert measure_importance(logits, dataset, COLUMNS, "binary") == found


def test_a_slow_model_gets_fewer_repeats_of_the_same(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure_importance(logits, dataset, COLUMNS, "binary")
    monkeypatch.setattr(explain, "_SECONDS", -1.0)
    short = measure_importance(logits, dataset, COLUMNS, "binary")
    assert whole is not None
    assert short.repeats == 1
    bands = {each.column: (each.low, each.high) for each in whole.columns}
    assert all(bands[each.column][0] <= each.loss <= bands[each.column][1] for each in short.columns)


def test_a_bundle_gives_it_back_and_an_older_one_has_none(dataset: Path, tmp_path: Path) -> None:
    assert read_importance(tmp_path) is None
    found = measure_importance(logits, dataset, COLUMNS, "binary", "logloss")
    write_facts(tmp_path / FILE, found.to_json())
    assert read_importance(tmp_path) == found
