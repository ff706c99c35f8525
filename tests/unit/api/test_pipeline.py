"""A pipeline from a frame: drafted, changed, written, checked, and built into a dataset that comes back as a frame."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import serin
from serin.errors import NotTrained, TableUnusable
from tests.fakes.small_pipeline import small_spec
from tests.logs import heard


@pytest.fixture
def frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    spec = small_spec(tmp_path, rows=400)
    table: pd.DataFrame = pq.read_table(spec["data"]["tables"]["parcels"]).to_pandas()
    table["sent"] = pd.date_range("2026-01-01", periods=len(table), freq="7min")
    return table


def test_equal_frames_are_one_table_under_the_home(frame: pd.DataFrame, tmp_path: Path) -> None:
    first = serin.Pipeline.draft(frame, target="hours > 30")
    again = serin.Pipeline.draft(frame.copy(), target="hours > 30")
    other = serin.Pipeline.draft(frame.head(200), target="hours > 30")
    assert first.spec == again.spec != other.spec
    assert len([*(tmp_path / "home" / "tables").iterdir()]) == 2
    assert first.name == "hours"


def test_an_index_with_a_name_is_a_column(frame: pd.DataFrame) -> None:
    pipeline = serin.Pipeline.draft(frame.set_index("sent"), target="hours > 30")
    assert pipeline.spec.data.time == "sent"


def test_a_frame_that_parquet_cannot_hold_names_its_column(frame: pd.DataFrame, tmp_path: Path) -> None:
    frame["weight"] = frame["weight"].astype(object)
    frame.loc[0, "weight"] = "heavy"
    with pytest.raises(TableUnusable, match=r"weight.*convert or drop that column"):
        serin.Pipeline.draft(frame, target="hours > 30")
    assert [*(tmp_path / "home" / "tables").iterdir()] == []


def test_a_draft_explains_itself_and_comes_back_from_yaml(frame: pd.DataFrame, tmp_path: Path) -> None:
    drafted = serin.Pipeline.draft(frame, target="hours > 30", name="late-parcels")
    assert "# carrier: text, 3 different values" in drafted.to_yaml(tmp_path / "pipeline.yaml")
    assert serin.Pipeline.from_yaml(tmp_path / "pipeline.yaml").spec == drafted.spec
    assert "carrier" in str(drafted.check())


def test_replace_changes_the_named_keys_alone(frame: pd.DataFrame) -> None:
    drafted = serin.Pipeline.draft(frame, target="hours > 30")
    changed = drafted.replace(model={"rounds": 64}, name="other")
    assert (changed.spec.model.rounds, changed.name) == (64, "other")
    assert changed.spec.model.kind == drafted.spec.model.kind == "xgboost"
    assert changed.spec.data == drafted.spec.data
    assert "rounds: 64" in changed.to_yaml()
    with pytest.raises(serin.SpecError, match=r"trainnig.*did you mean 'training'"):
        drafted.replace(trainnig={"epochs": 1})


def test_a_draft_scales_its_numbers_also_for_a_network_that_is_chosen_later(frame: pd.DataFrame) -> None:
    drafted = serin.Pipeline.draft(frame, target="hours > 30").replace(model={"kind": "mlp"})
    assert "not scaled" not in str(drafted.check())
    unscaled = drafted.replace(features=[{"columns": ["distance"], "steps": ["fill_median"]}])
    assert "warning: not scaled for a network: distance (" in str(unscaled.check())
    assert "not scaled" not in str(unscaled.replace(model={"numeric_scaling": "robust"}).check())
    assert "not scaled" not in str(unscaled.replace(model={"kind": "xgboost"}).check())


def test_times_in_the_future_are_warned_of_by_the_check_and_the_build(frame: pd.DataFrame) -> None:
    assert "future" not in str(serin.Pipeline.draft(frame.head(300), target="hours > 30").check())
    frame["sent"] += pd.Timedelta(days=36500)
    pipeline = serin.Pipeline.draft(frame, target="hours > 30")
    said: list[str] = []
    with heard(said.append):
        pipeline.build_dataset()
    warnings = [line for line in (*said, *str(pipeline.check()).splitlines()) if "in the future" in line]
    assert len(warnings) == 2
    assert all("data.time has times in the future: the latest row is of 21" in line for line in warnings)


def test_a_dataset_comes_back_as_a_frame_with_the_values_that_codes_mean(frame: pd.DataFrame) -> None:
    frame.loc[3, "carrier"] = None
    features = [
        {"columns": ["distance"], "steps": ["fill_median"]},
        {"columns": ["carrier"], "steps": [{"categorify": {"min_count": 1}}]},
        {"columns": ["sent"], "steps": [{"date_parts": ["hour", "weekday"]}]},
    ]
    pipeline = serin.Pipeline.draft(frame, target="hours > 30").replace(features=features)
    with pytest.raises(NotTrained, match=r"Pipeline\.train"):
        pipeline.export()
    dataset = pipeline.build_dataset(fresh=True)
    whole = pd.concat([dataset.to_pandas(split) for split in ("train", "valid", "test")]).sort_index()
    assert dataset.ran
    assert dataset.receipt is not None
    assert whole.index.tolist() == list(range(400))
    known = frame["carrier"].notna()
    assert whole["carrier"].notna().tolist() == known.tolist()
    assert whole["carrier"][known].tolist() == frame["carrier"][known].tolist()
    assert whole["distance"].tolist() == frame["distance"].tolist()
    assert whole["sent_hour"].astype(int).tolist() == frame["sent"].dt.hour.tolist()
    assert whole["sent_weekday"].astype(int).tolist() == (frame["sent"].dt.weekday + 1).tolist()
    assert whole["target"].tolist() == (frame["hours"] > 30).astype(np.int8).tolist()
    with pytest.raises(ValueError, match="use one of train, valid, test"):
        dataset.to_pandas("all")  # type: ignore[arg-type]


def test_a_result_is_shown_with_its_reason_and_its_page(frame: pd.DataFrame) -> None:
    pipeline = serin.Pipeline.draft(frame, target="hours > 30")
    built, found = pipeline.build_dataset(), pipeline.build_dataset()
    assert (built.ran, found.ran, found.receipt) == (True, False, None)
    assert "no earlier result" in repr(built)
    assert "made before" in found._repr_html_()
    assert "<iframe" in (built.report()._repr_html_() or "")
    assert built.report().path.name == "report.html"


def test_what_needs_a_stack_fails_before_any_work(frame: pd.DataFrame) -> None:
    pipeline = serin.Pipeline.draft(frame, target="hours > 30")
    for ask in (pipeline.roll_out, pipeline.run):
        with pytest.raises(serin.StackError, match="serin up"):
            ask()


def test_a_model_with_its_own_inputs_has_no_dataset(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    pipeline = serin.Pipeline({"name": "own", "model": {"script": str(script), "task": "binary"}})
    with pytest.raises(serin.SpecError, match="has no dataset"):
        pipeline.build_dataset()
    assert "defines its own inputs" in str(pipeline.check())
