"""`check` reports every mistake at once: of the spec alone, and of the spec compared with its tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from serin.draft.guess import draft_table
from serin.errors import SpecError
from serin.etl import trial
from serin.etl.sources import tables as opened_tables
from serin.formats.serving.journal import NOT_PROMISED
from serin.pipeline.check import check_spec
from serin.store.store import Store
from tests.fakes.small_pipeline import small_spec
from tests.unit.serving import bundles

ROWS = 60
MISTAKES = {
    "name": "small",
    "data": {
        "tables": {"main": "main.parquet", "side": "side.parquet", "gone": "gone.parquet"},
        "joins": [
            {"with": "side", "on": "id", "columns": ["size", "x"]},
            {"with": "gone", "on": "id", "columns": ["colour"]},
        ],
        "derived": {"ratio": "id / 2"},
        "where": "x > 'a'",
        "target": {"expression": "zz > 1", "task": "binary"},
        "time": "x",
        "id": "nope",
        "checks": [{"column": "id", "min": 1}, {"column": "sise", "min": 0}],
        "split": {"group": "x", "kind": "group"},
    },
    "features": [
        {"columns": ["id"], "steps": ["normalize"]},
        {"columns": ["ratio", "size", "sizee", "colour"], "steps": ["fill_median"]},
    ],
}
FOUND = [
    ("data.tables.gone", "nothing at"),
    ("data.joins[0].columns", "column 'x' comes from both 'main' and 'side'"),
    ("data.derived.ratio", "strings have no arithmetic"),
    ("data.where", "a string is compared"),
    ("data.target", "column 'zz' is not in 'main'"),
    ("data.time", "'x' is a float"),
    ("data.id", "column 'nope' is not in 'main'"),
    ("data.split.group", "'x' is a float, which cannot be a key"),
    ("data.checks[0]", "min and max need a number"),
    ("data.checks[1]", "column 'sise' is not in 'main'; did you mean 'size'?"),
    ("features[0]", "normalize needs a number"),
    ("features[1].columns", "column 'sizee' is not in 'main'; did you mean 'size'?"),
]


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, home: Path) -> None:
    main = {
        "id": [f"k{row % 7}" for row in range(ROWS)],
        "x": [float(row) for row in range(ROWS)],
        "y": [row % 2 for row in range(ROWS)],
        "note": ["soon"] * ROWS,
    }
    pq.write_table(pa.table(main), tmp_path / "main.parquet", row_group_size=10)
    side = {"id": [f"k{row}" for row in range(7)], "size": list(range(7)), "x": [0.5] * 7}
    pq.write_table(pa.table(side), tmp_path / "side.parquet")


def told_of(folder: Path, spec: dict[str, Any]) -> str:
    """What is said of a spec in a file."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    return str(check_spec(path))


def problems_of(folder: Path, spec: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        told_of(folder, spec)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"{folder / 'spec.yaml'}: ")
    return [(key, text) for key, text in caught.value.problems]


def good(**data: Any) -> dict[str, Any]:
    section = {
        "tables": {"main": "main.parquet", "side": "side.parquet"},
        "joins": [{"with": "side", "on": "id", "columns": ["size"]}],
        "target": {"expression": "y == 1", "task": "binary"},
    }
    return {"name": "small", "data": section | data, "features": [{"columns": ["x"], "steps": ["normalize"]}]}


def unfound(problems: list[tuple[str, str]], expected: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(key, text) for key, text in expected if not any(key == k and text in t for k, t in problems)]


def test_twelve_mistakes_in_one_spec_are_twelve_lines(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, MISTAKES)
    assert not unfound(problems, FOUND)
    assert len(problems) == len(FOUND), problems


def test_a_mistake_of_the_spec_alone_does_not_hide_those_that_only_the_tables_show(tmp_path: Path) -> None:
    spec = {**MISTAKES, "training": {"epohcs": 3}, "features": [*MISTAKES["features"], {"columns": ["x"]}]}  # type: ignore[misc]
    expected = [*FOUND, ("training.epohcs", "did you mean 'epochs'?"), ("features[2].steps", "is missing")]
    problems = problems_of(tmp_path, spec)
    assert not unfound(problems, expected)
    assert len(problems) == len(expected), problems


def test_a_wide_table_is_opened_a_few_times_and_every_wrong_column_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, wrong = [f"c{place}" for place in range(300)], ["c7", "c8", "c250"]
    columns = {name: ["x", "1"] if name in wrong else [1.0, 2.0] for name in names}
    pq.write_table(pa.table({**columns, "y": [0, 1]}), tmp_path / "wide.parquet")
    section = {
        "tables": {"wide": str(tmp_path / "wide.parquet")},
        "target": {"expression": "y == 1", "task": "binary"},
    }
    opened: list[object] = []
    plain = opened_tables.open_parquet
    monkeypatch.setattr(opened_tables, "open_parquet", lambda *given: opened.append(given) or plain(*given))
    numbers = {"columns": [name for name in names if name not in wrong], "steps": ["normalize"]}
    spec = {"name": "wide", "data": section, "features": [numbers]}
    check_spec(spec)
    assert len(opened) < 10
    times = {"columns": wrong, "steps": [{"date_parts": ["hour"]}]}
    with pytest.raises(SpecError) as refusal:
        check_spec({**spec, "features": [numbers, times]})
    assert all(any(repr(name) in text for _, text in refusal.value.problems) for name in wrong)
    assert len(opened) < 100


def test_a_column_without_a_name_is_refused_and_a_draft_gives_it_one(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    table = pa.table(
        {"": random.normal(size=200), "x": random.normal(size=200), "y": random.integers(0, 2, 200)}
    )
    pq.write_table(table, tmp_path / "t.parquet")
    section = {
        "tables": {"t": str(tmp_path / "t.parquet")},
        "target": {"expression": "y == 1", "task": "binary"},
    }
    features = [{"columns": ["", "x"], "steps": ["normalize"]}]
    with pytest.raises(SpecError, match=r"no request column may be called ''.*rename"):
        check_spec({"name": "unnamed", "data": section, "features": features})
    (tmp_path / "spec.yaml").write_text(draft_table(tmp_path / "t.parquet", "y").text)
    asked = [column.name for column in check_spec(tmp_path / "spec.yaml").inputs]
    assert sorted(asked) == ["input_without_name", "x"]


def test_columns_that_an_unreadable_entry_may_make_are_not_called_missing(tmp_path: Path) -> None:
    spec = good(derived={"twice": "x *", "half": "x / 2"}, time="nine")
    spec["features"] = [{"columns": ["twice", "half"], "steps": ["normalize"]}]
    problems = problems_of(tmp_path, spec)
    assert [key for key, _ in problems] == ["data.derived"]


def test_what_only_the_values_show_is_found_beside_other_mistakes(tmp_path: Path) -> None:
    twice = {"id": ["k0", *(f"k{row}" for row in range(6))], "size": list(range(7))}
    pq.write_table(pa.table(twice), tmp_path / "side.parquet")
    expected = [
        ("data.joins[0].on", "key (id='k0') occurs 2 times"),
        ("data.time", "does not parse as a time"),
    ]
    missing = ("data.split.group", "column 'nope' is not in 'main'")
    spec = good(time="note", split={"group": "nope"})
    assert not unfound(found := problems_of(tmp_path, spec), [*expected, missing])
    assert len(found) == 3
    assert not unfound(
        found := problems_of(tmp_path, {**spec, "etl": {"engin": "cpu"}}), [*expected, missing]
    )
    assert len(found) == 4


def test_a_text_that_is_not_a_time_is_named_by_its_table_where_a_feature_needs_a_time(
    tmp_path: Path,
) -> None:
    spec = {**good(), "features": [{"columns": ["note"], "steps": [{"date_parts": ["hour"]}]}]}
    ((key, text),) = problems_of(tmp_path, spec)
    assert key == "data.tables.main"
    assert "column 'note' does not parse as a time: 'soon' (row 0" in text
    assert "data.time" not in text


def test_a_wrong_target_does_not_hide_the_other_mistakes(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, good(target={"expression": "y >", "task": "binary"}, id="nope"))
    assert [key for key, _ in problems] == ["data.target.expression", "data.id"]


def test_a_file_of_your_own_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, {**good(), "model": {"onnx": "net.onnx"}})
    assert [key for key, _ in problems] == ["model.onnx"]


def test_a_good_spec_says_which_rows_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rows" not in told_of(tmp_path, good())
    monkeypatch.setattr(trial, "MAX_ROWS", 20)
    monkeypatch.setattr(trial, "_JOIN_BYTES", 0)
    said = told_of(tmp_path, good())
    assert "checked on 20 of 60 rows" in said
    assert "side is large" in said


@pytest.mark.parametrize(
    ("capture", "says"),
    [
        ("{share: 0}", "live version 1: none are recorded (monitoring.capture.share is 0)"),
        ("{share: 1, drop: [temp]}", "live version 1: they lack temp (monitoring.capture.drop)"),
        ("{share: 1}", None),
    ],
)
def test_recorded_requests_that_the_live_version_lacks_are_named(
    tmp_path: Path, capture: str, says: str | None
) -> None:
    store = Store.open()
    bundles.publish(store, bias=0.0, spec=f"monitoring: {{capture: {capture}}}\n")
    store.set_alias(bundles.MODEL, "live", 1)
    spec = {**good(), "name": bundles.MODEL, "rollout": {"steps": ["shadow", 100]}}
    spec["monitoring"] = {"capture": {"share": 0.5}}
    if says is None:
        assert "shadow" not in told_of(tmp_path, spec)
        return
    ((key, text),) = problems_of(tmp_path, spec)
    assert key == "rollout.steps"
    assert f"shadow replays recorded requests of {says}" in text


def test_a_range_of_replicas_is_refused_where_one_machine_serves(tmp_path: Path) -> None:
    spec = {**good(), "serving": {"replicas": {"min": 1, "max": 8}}}
    ((key, text),) = problems_of(tmp_path, spec)
    assert key == "serving.replicas"
    assert text.startswith(
        "{min: 1, max: 8}: one machine runs one replica of a release; set a number, or serve on Kube"
    )


def test_columns_whose_drift_cannot_be_watched_are_named(tmp_path: Path) -> None:
    monitoring: dict[str, Any] = {"capture": {"share": 1, "mask": ["x"]}, "drift": {"tolerance": 0.05}}
    features = [{"columns": ["x", "size"], "steps": ["normalize"]}]
    for asked, named in ((None, True), (["size"], False)):
        monitoring["drift"]["columns"] = asked
        spec = {**good(), "features": features, "monitoring": monitoring}
        assert ("drift of x is not watched: monitoring.capture" in told_of(tmp_path, spec)) is named


@pytest.mark.parametrize(
    ("monitoring", "trigger"),
    [
        ({"retrain": ["drift"]}, "drift"),
        ({"retrain": ["nightly", "quality"]}, "quality"),
        ({"retrain": ["drift"], "capture": {"share": 1}, "drift": {"tolerance": 0.05}}, None),
        ({"retrain": ["nightly", "data"]}, None),
    ],
)
def test_a_retraining_that_no_alarm_of_serin_starts_is_named(
    tmp_path: Path, monitoring: dict[str, Any], trigger: str | None
) -> None:
    told = told_of(tmp_path, {**good(), "monitoring": monitoring})
    lines = [line for line in told.splitlines() if line.startswith("monitoring.retrain")]
    expected = f"monitoring.retrain: {trigger} waits for events `serin.{trigger}` from outside"
    assert [line.partition(": without ")[0] for line in lines] == ([expected] if trigger else [])


@pytest.mark.parametrize("second_opinion", [False, True])
def test_check_says_where_the_promise_of_a_rollout_ends(tmp_path: Path, second_opinion: bool) -> None:
    spec = small_spec(tmp_path / "data", rows=200, rollout={"second_opinion": second_opinion})
    assert f"rollout.false_rollback (0.01) is {NOT_PROMISED}" in str(check_spec(spec))
