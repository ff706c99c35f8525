"""What `import serin` offers, a pipeline from a frame, and its progress shown once."""

import inspect
import io
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import serin
from serin.api.progress import progress_lines, share_done, showing_progress
from serin.errors import NotTrained, TableUnusable
from serin.machine.log_times import log_at
from serin.training.launch.progress import describe
from tests.fakes.small_pipeline import small_spec
from tests.logs import heard


@pytest.fixture
def frame(tmp_path: Path, home: Path) -> pd.DataFrame:
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


OFFERED = [
    "Checkpoint", "Client", "DataError", "Dataset", "Explanation", "ExportError", "Model", "Pipeline", "RolloutError",
    "SerinError", "ServingError", "SpecError", "StackError", "Store", "StoreError", "TrainingError", "__version__",
]  # fmt: skip
OF_A_PIPELINE = [
    "build_dataset", "check", "draft", "export", "from_yaml", "name", "replace", "roll_out", "run", "spec", "to_yaml",
    "train",
]  # fmt: skip
OF_A_RESULT = ["path", "ran", "receipt", "why"]


def public(kind: type) -> list[str]:
    annotated = {name for each in kind.__mro__ for name in inspect.get_annotations(each)}
    return sorted(name for name in annotated | set(dir(kind)) if not name.startswith("_"))


def test_serin_offers_these_names_and_no_others() -> None:
    assert serin.__all__ == OFFERED
    assert dir(serin) == OFFERED
    assert all(getattr(serin, name) for name in OFFERED)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Piepline'; it offers .*Pipeline"):
        serin.Piepline  # noqa: B018


def test_the_classes_offer_these_names_and_no_others() -> None:
    assert public(serin.Pipeline) == OF_A_PIPELINE
    assert public(serin.Dataset) == sorted([*OF_A_RESULT, "digest", "report", "rows", "to_pandas"])
    assert public(serin.Checkpoint) == sorted([*OF_A_RESULT, "metrics", "step"])
    assert public(serin.Explanation) == ["frame", "method", "note", "rows", "scale", "sources"]
    model = ["add_labels", "card", "digest", "explain", "load", "metrics", "name", "predict", "version"]
    assert public(serin.Model) == sorted([*OF_A_RESULT, *model])


def test_every_offered_class_and_method_says_what_it_does() -> None:
    kinds = [getattr(serin, name) for name in OFFERED if inspect.isclass(getattr(serin, name))]
    ours = [kind for kind in kinds if kind.__module__.startswith("serin.api")]
    methods = [
        method
        for kind in ours
        for name, method in inspect.getmembers(kind, callable)
        if not name.startswith("_")
    ]
    assert methods
    assert [item for item in [*ours, *methods] if not inspect.getdoc(item)] == []


STEP = {"event": "step", "epoch": 1, "epochs": 2, "step": 1500, "steps": 6000, "loss": 0.5, "rows_per_s": 9e5}
LOG = logging.getLogger("serin.pipeline.train")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def alone() -> Iterator[None]:
    """The logger as in a program that has configured nothing. (pytest adds its handlers when a test is called.)"""
    logger = logging.getLogger("serin")
    pytests, logger.handlers, logger.propagate = logger.handlers, [], False
    yield
    logger.handlers, logger.propagate = pytests, True


def test_a_line_about_a_training_step_or_a_piece_says_how_much_is_done() -> None:
    assert share_done(describe(STEP) or "") == 0.25
    assert share_done("fitting: 3 of 12 pieces") == 0.25
    assert share_done("epoch 1/2 done: valid_auc 0.7312 (best so far)") is None


def test_lines_are_shown_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with alone():
        with showing_progress("training"):
            LOG.info("%s", describe(STEP))
        LOG.info("after the block")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("step 1,500/6,000, loss 0.5000, 900,000 rows/s")


def test_a_line_shows_its_own_time_and_not_that_of_its_arrival(capsys: pytest.CaptureFixture[str]) -> None:
    with alone(), showing_progress("training"):
        for later_s in (-10.0, 1000.0, 2000.0):
            log_at(LOG, "epoch done", time.time() + later_s)
    shown = [float(line.partition(" s  ")[0]) for line in capsys.readouterr().err.splitlines()]
    assert shown[0] == 0.0  # of a machine whose clock is behind
    assert shown[1] >= 1000.0
    assert shown[2] >= 2000.0


def test_a_terminal_shows_a_bar_and_keeps_the_lines_that_are_not_about_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with alone(), progress_lines(), showing_progress("training"), showing_progress("within"):
        LOG.info("training on the CPU: 1 process")
        LOG.info("%s", describe(STEP))
    assert shown.getvalue().count("s  training on the CPU: 1 process\n") == 1
    assert " 25%" in shown.getvalue()
    assert "s  epoch 1/2, step" not in shown.getvalue(), "it is the bar's"


def test_nothing_is_added_where_the_program_has_its_own_handlers(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serin")
    with showing_progress("training"):
        LOG.info("a line")
    assert [record.getMessage() for record in caplog.records] == ["a line"]
    assert capsys.readouterr().err == ""
