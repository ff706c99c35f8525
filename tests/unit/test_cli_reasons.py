"""`serin explain` for recorded requests: the release that answered explains, and what differs or is missing is said."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from serin.errors import ExplanationRefused, NotFound, NotRecorded, RequestUnknown, SpecError
from tests.fakes.recorded_answers import MODEL, NOON, Model, make_model, record, some_flights
from tests.unit.test_cli_captures import serin


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("reasons")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIN_HOME", str(folder / "other"))
        return make_model(folder, str(folder / "store"))


@pytest.fixture
def home(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SERIN_STORE", model.store.url)
    return tmp_path / "home"


def explained(*words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(serin("explain", MODEL, *words, "--json").output)
    return found


def check_sum(row: dict[str, Any]) -> None:
    assert row["base"] + sum(row["contributions"].values()) == pytest.approx(row["margin"], abs=1e-5)
    assert 1 / (1 + np.exp(-row["margin"])) == pytest.approx(row["score"], abs=1e-5)


def test_a_recorded_answer_is_explained_with_the_values_that_were_sent(
    home: Path, model: Model, tmp_path: Path
) -> None:
    rows = some_flights(310, 5)
    record(home, model.base, tmp_path / "scratch", rows, ["a", "b", "b", "b", "c"])
    (one,) = explained("--id", "a")
    assert (one["id"], one["row"], one["release"], one["difference"]) == ("a", 0, "flights-v1", "")
    assert one["recorded"] == pytest.approx(one["score"], abs=1e-7)
    check_sum(one)
    sent = rows.to_pylist()[0]
    assert one["values"]["carrier"] == sent["carrier"]
    assert one["values"]["stops"] == sent["stops"]
    assert one["sources"]["seats"] == "lookup in planes by tailnum"
    batch = explained("--id", "b")
    assert [row["row"] for row in batch] == [0, 1, 2]
    for row in batch:
        check_sum(row)
    assert explained("--id", "b", "--row", "2") == batch[2:]
    said = serin("explain", MODEL, "--id", "b").output
    assert "answered by flights-v1\n" in said
    assert "request b, row 2, 2026-03-01 12:00:00 UTC: score " in said
    assert "DIFFERENT" not in said


def test_each_answer_is_explained_by_the_edition_that_gave_it(
    home: Path, model: Model, tmp_path: Path
) -> None:
    rows = some_flights(310, 1).set_column(2, "tailnum", pa.array(["N1"]))
    edition = model.refresh(N1=190)
    record(home, model.base, tmp_path / "one", rows, ["old"])
    record(home, edition, tmp_path / "two", rows, ["new"], t=NOON + 3600)
    (old,), (new,) = explained("--id", "old"), explained("--id", "new")
    assert (old["release"], new["release"]) == ("flights-v1", f"flights-v1e{edition.edition}")
    assert old["difference"] == new["difference"] == ""
    assert old["contributions"]["seats"] != new["contributions"]["seats"]
    assert (old["values"]["seats"], new["values"]["seats"]) == (10, 190)
    assert re.search(r"seats +190 ", serin("explain", MODEL, "--id", "new").output)
    assert old["recorded"] != new["recorded"]
    model.store.remove(f"models/{MODEL}/versions/{edition.release.label}")
    with pytest.raises(
        ExplanationRefused, match=rf"{edition.release.name} cannot be explained: it answered .* removed"
    ):
        explained("--id", "new")
    assert explained("--id", "old") == [old]


def test_masked_and_dropped_columns_are_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("SERIN_HOME", str(home))
    capture = {"share": 1.0, "mask": ["carrier"], "drop": ["stops"]}
    model = make_model(tmp_path, str(home / "store"), monitoring={"capture": capture})
    rows = some_flights(0, 400)
    known = [place for place, row in enumerate(rows.to_pylist()) if row["carrier"] == "BB" and row["stops"]][
        :1
    ]
    record(home, model.base, tmp_path / "scratch", rows.take(known), ["a"])
    (row,) = explained("--id", "a")
    assert row["masked"] == {"carrier": "masked", "stops": "not recorded"}
    assert (row["values"]["carrier"], row["values"]["stops"]) == ("masked", "not recorded")
    assert "carrier is masked, stops is not recorded, so null in what is computed now" in row["difference"]
    check_sum(row)
    said = serin("explain", MODEL, "--id", "a").output
    assert "DIFFERENT: the recorded answer is " in said
    assert "carrier is masked: what is shown is computed with null in its place" in said
    with pytest.raises(SpecError, match="'carrier' are not recorded"):
        serin("explain", MODEL, "--where", "carrier = 'BB'")


def test_an_answer_that_cannot_be_computed_again_is_said_to_differ(
    home: Path, model: Model, tmp_path: Path
) -> None:
    changed = {"_answer_score": [0.125, 0.25]}
    record(home, model.base, tmp_path / "scratch", some_flights(310, 2), ["a", "a"], **changed)
    first, second = explained("--id", "a")
    for row, recorded in ((first, 0.125), (second, 0.25)):
        assert row["recorded"] == recorded
        assert row["difference"].startswith(
            f"the recorded answer is {recorded}, computed again it is {row['score']:.6g}"
        )
    out = tmp_path / "why.parquet"
    said = serin("explain", MODEL, "--where", "_answer_score > 0.2", "--out", str(out)).output
    assert "1 answer computed again differ" in said
    assert pa.parquet.read_table(out)["agrees"].to_pylist() == [False]


def test_a_request_without_a_record_is_an_error_that_says_why(
    home: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotRecorded):
        serin("explain", MODEL, "--id", "a")
    with pytest.raises(NotFound, match="no model 'trains'"):
        serin("explain", "trains", "--id", "a")
    record(home, model.base, tmp_path / "one", some_flights(310, 1), ["a"])
    failed = {"_status": [503], "_answer_score": [None]}
    record(home, model.base, tmp_path / "two", some_flights(311, 1), ["failed"], **failed)
    with pytest.raises(
        RequestUnknown, match=r"the oldest records are of 2026-03-01 12h UTC .* has expired"
    ) as unknown:
        serin("explain", MODEL, "--id", "b")
    assert unknown.value.exit_code == 2
    with pytest.raises(RequestUnknown, match="look without --since and --until"):
        serin("explain", MODEL, "--id", "a", "--since", "2026-03-02")
    with pytest.raises(RequestUnknown, match="it has no row 3; its recorded rows are 0 to 0"):
        serin("explain", MODEL, "--id", "a", "--row", "3")
    with pytest.raises(ExplanationRefused, match="request failed got status 503 and no score"):
        serin("explain", MODEL, "--id", "failed")
    monkeypatch.setattr("serin.api.recorded.is_drawn", lambda request, share: False)
    with pytest.raises(RequestUnknown, match=r"1 of them .* and this one is not"):
        serin("explain", MODEL, "--id", "b")


def test_only_one_of_rows_id_and_where_is_taken(home: Path, tmp_path: Path) -> None:
    for words in ([], ["rows.csv", "--id", "a"], ["--id", "a", "--where", "true"]):
        assert "name one: a file with rows" in serin("explain", MODEL, *words).output
    for option, words in {
        "--row": ["rows.csv", "--row", "1"],
        "--since": ["rows.csv", "--since", "2026-01-01"],
    }.items():
        assert f"{option} is for" in serin("explain", MODEL, *words).output


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_all_answers_of_a_day_that_fit_a_condition_are_written_with_their_reasons(
    home: Path, model: Model, tmp_path: Path, suffix: str
) -> None:
    ids = [f"r{number}" for number in range(60)]
    record(home, model.base, tmp_path / "day", some_flights(300, 60), ids, t=NOON + 3600)
    record(home, model.base, tmp_path / "before", some_flights(300, 60), ids, t=NOON - 86_400)
    lost = {"_status": [503], "_answer_score": [None]}
    record(home, model.base, tmp_path / "lost", some_flights(310, 1), ["lost"], **lost)
    shown = json.loads(serin("captures", "show", MODEL, "-n", "200", "--json").output)
    threshold = float(np.median([row["_answer_score"] for row in shown if row["_answer_score"] is not None]))
    wanted = {
        row["_id"] for row in shown if row["_answer_score"] is not None and row["_answer_score"] > threshold
    }
    out = tmp_path / f"why.{suffix}"
    day = ("--since", "2026-03-01", "--until", "2026-03-02")
    said = serin("explain", MODEL, "--where", f"_answer_score > {threshold}", *day, "--out", str(out)).output
    assert said == f"{len(wanted)} recorded rows explained into {out}\n"
    rows = read(out)
    assert {row["_id"] for row in rows} == wanted
    for row in rows:
        parts = [
            row[name]
            for name in ("carrier", "distance", "tailnum", "dep", "stops", "night", "num", "seats", "maker")
        ]
        assert row["base"] + sum(parts) == pytest.approx(row["margin"], abs=1e-5)
        assert (row["_release"], row["agrees"], row["recorded"]) == (
            "flights-v1",
            True,
            pytest.approx(row["score"]),
        )
    said = serin("explain", MODEL, "--where", "_status > 0", *day, "--out", str(out)).output
    assert "60 recorded rows" in said
    assert "1 row without an answer left out" in said
    said = serin(
        "explain", MODEL, "--where", "_answer_score > 2", "--out", str(tmp_path / f"none.{suffix}")
    ).output
    assert said == "no recorded answer fits the condition; no file was written\n"
    assert not (tmp_path / f"none.{suffix}").exists()


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pa.parquet.read_table(path).to_pylist()
    if path.suffix == ".csv":
        return pa.csv.read_csv(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_condition_that_cannot_be_computed_is_refused(home: Path, model: Model, tmp_path: Path) -> None:
    record(
        home, model.base, tmp_path / "scratch", some_flights(310, 30), [f"r{number}" for number in range(30)]
    )
    for condition, problem in {
        "decision == 'refused'": "the records have no column 'decision'; they have _answer_score",
        "_answer_score": "is not a condition",
        "_answer_score >": "--where",
    }.items():
        with pytest.raises(SpecError, match=problem):
            serin("explain", MODEL, "--where", condition)
    shown = serin("explain", MODEL, "--where", "_answer_score > 0").output
    assert shown.count("score 0.") == 20
    assert "the first 20 rows are shown" in shown
    assert len(explained("--where", "_answer_score > 0", "--rows", "3")) == 3
