"""Labels from the command, refusals of the controller, and decisions that are followed."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from serin.api.model import Model
from serin.cli import app
from serin.errors import LabelsUnfit, NotFound, RolloutRefused, SourceUnreadable
from serin.formats.serving.journal import Decision
from serin.pipeline import roll_out
from serin.pipeline.roll_out import begin_rollout, follow_decisions
from serin.pipeline.stage import StageResult
from serin.rollout.run.commands import Answer, Mailbox
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from tests.fakes.labelled import requests
from tests.fakes.rollout import home_journals
from tests.kit.recorded_parts import write_part
from tests.unit.serving import bundles

SPEC = """
name: delays
data:
  tables: {flights: flights.parquet}
  target: {expression: arr_delay > 15, task: binary}
features: [{columns: [temp, distance], steps: [fill_median]}, {columns: [carrier], steps: [categorify]}]
monitoring: {capture: {share: 1, mask: [carrier]}}
objectives: {latency_ms: 50}
"""


@pytest.fixture
def bundle(home: Path) -> Bundle:
    """A published version with three recorded requests."""
    made = bundles.publish(Store.open(), bias=0.0, spec=SPEC)
    write_part(home, bundles.MODEL, made.version, requests(3).table)
    return made


def run(*arguments: str, name: str = bundles.MODEL) -> Any:
    done = CliRunner().invoke(app, ["labels", "add", name, *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.csv", "request,arr_delay\n0-1-0,20\n0-1-1,NA\n0-1-2,3\nelse,1\n"),
        (
            "labels.jsonl",
            """{"request": "0-1-0", "arr_delay": 20}
            {"request": "0-1-1"}
            {"request": "0-1-2", "arr_delay": 3}
            {"request": "else", "arr_delay": 1}
            """,
        ),
    ],
)
def test_labels_of_a_text_file_are_matched_kept_and_counted(
    bundle: Bundle, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    done = run(str(tmp_path / name), "--id", "request")
    found = {key: done[key] for key in ("rows", "stored", "matched", "unknown", "missing")}
    assert found == {"rows": 4, "stored": 3, "matched": 2, "unknown": 1, "missing": 1}
    assert run(str(tmp_path / name), "--id", "request")["stored"] == 0


def test_numbers_stay_ids_in_csv(bundle: Bundle, tmp_path: Path, home: Path) -> None:
    (tmp_path / "labels.csv").write_text("_id,_label\n007,1\n")
    run(str(tmp_path / "labels.csv"))
    (file,) = (home / "labels" / bundles.MODEL).glob("*.parquet")
    assert pd.read_parquet(file)["key"].tolist() == ["007\x1f0"]


def test_labels_come_from_a_table_of_the_spec_or_from_several_files(
    bundle: Bundle, tmp_path: Path, home: Path
) -> None:
    frame = pd.DataFrame(
        {"carrier": ["AA"] * 3, "order": ["0-1-0", "0-1-1", "x"], "arr_delay": [99.0, 1.0, 20.0]}
    )
    frame.to_csv(
        Path(bundle.path) / "flights.parquet"
    )  # the spec's path is relative to it; not a Parquet file
    with pytest.raises(SourceUnreadable, match=r"data\.tables\.flights"):
        run("flights", "--id", "order")
    frame.to_parquet(Path(bundle.path) / "flights.parquet")
    done = run("flights", "--id", "order")
    assert (done["stored"], done["matched"], done["unknown"]) == (3, 2, 1)
    for number in range(2):
        frame.iloc[number : number + 1].to_parquet(tmp_path / f"part-{number}.parquet")
    done = run(str(tmp_path / "part-*.parquet"), "--id", "order")
    assert (done["rows"], done["matched"]) == (2, 2)


def test_a_frame_s_labels_are_added_in_python(bundle: Bundle) -> None:
    model = Model.load(bundle.model, bundle.version)
    frame = pd.DataFrame({"request": ["0-1-0", "0-1-2", "later"], "late": [True, False, True]})
    done = model.add_labels(frame, request_id="request", value="late")
    assert (done.stored, done.matched, done.unknown, done.key) == (3, 2, 1, "_id")


def test_labels_are_not_joined_by_a_masked_column(bundle: Bundle) -> None:
    model = Model(StageResult(value=bundle, ran=True, why="", receipt=None))
    with pytest.raises(LabelsUnfit, match="'carrier' is masked or dropped in the records"):
        model.add_labels(pd.DataFrame({"carrier": ["AA"], "_label": [1]}), on=["carrier"])


def test_a_file_that_is_no_table_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "labels.parquet").write_text("no")
    with pytest.raises(LabelsUnfit, match=r"cannot be read from .*labels\.parquet"):
        run(str(tmp_path / "labels.parquet"))
    with pytest.raises(LabelsUnfit, match=r"use \.parquet, \.csv, \.jsonl, or a table of the spec: flights"):
        run(str(tmp_path / "labels.xlsx"))


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["labels", "add", bundles.MODEL, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_people_read_their_own_column_names_and_numbers_that_agree(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("request,n,late\n0-1-0,0,1\n0-1-1,9,1\nelse,0,\n")
    assert shown(str(path), "--id", "request", "--row", "n", "--value", "late").splitlines() == [
        "2 labels for delays, joined by request",
        "  1 is about a recorded row",
        "  1 names a row that its request does not have; not used",
        "  1 row has no label",
    ]


def test_a_table_without_a_label_is_not_taken_for_one_that_was_added_before(
    bundle: Bundle, tmp_path: Path
) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("_id,_label\n0-1-0,\n")
    said = shown(str(path)).splitlines()
    assert said == ["1 row, and no label that can be used", "  1 row has no label"]
    path.write_text("_id,_label\n0-1-0,1\n")
    shown(str(path))
    assert shown(str(path)).startswith("1 row, nothing new: the same labels were added before")


def test_a_second_call_with_a_time_column_says_that_labels_are_mixed(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("_id,_label,at\n0-1-0,1,2026-03-02T09:00:00\n")
    assert "warning" not in shown(str(path))
    assert "warning: some labels were added with --time and others without" in shown(
        str(path), "--time", "at"
    )


def test_an_unknown_version_is_a_wrong_argument(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no version of 'delays': '7'") as error:
        run("labels.csv", name=f"{bundles.MODEL}:7")
    assert error.value.exit_code == 2


@pytest.mark.parametrize("reason", ["no records", "rollout start of 'flights' refused: no records"])
def test_a_refusal_names_the_command_once(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    answer = Answer(id="1", accepted=False, reason=reason)
    monkeypatch.setattr(Mailbox, "ask", lambda *_: answer)
    monkeypatch.setattr("serin.pipeline.roll_out._why_trained", lambda _: "")
    with pytest.raises(RolloutRefused) as refused:
        begin_rollout(PipelineSpec.model_construct(name="flights"), Release(model="flights", version=1))
    assert str(refused.value) == "rollout start of 'flights' refused: no records"


def decision(phase: str) -> Decision:
    return Decision(
        t=1.0, rollout="r", phase=phase, step=None, weight=0.0, verdict=None, reason="x" * 200, by="test"
    )


def test_a_decision_after_a_compaction_is_neither_missed_nor_repeated(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_out, "_POLL_S", 0.01)
    heard, looks = [], []
    journal = home_journals(home, compact_at=1, young_s=0.0).open("flights")
    for phase in ("pending", "loading", "verifying", "shifting"):
        journal.append(decision(phase))

    def until(decisions: list[Decision]) -> bool:
        looks.append(len(decisions))
        if len(looks) == 1:
            assert journal.compact(lambda _: {1})
            journal.append(decision("aborting"))
            journal.append(decision("rolled_back"))
        return len(looks) == 2

    follow_decisions("flights", "r", lambda found: heard.append(found.phase), until=until)
    assert looks == [4, 4], "as many decisions as before, but others"
    assert heard == ["pending", "loading", "verifying", "shifting", "aborting", "rolled_back"]
