"""A run of score/scheduled scores what has come, says how much, and fails by name where files do not fit."""

import asyncio
import json
from pathlib import Path

import pytest

from flows.score import score
from serin.errors import ScoringRefused
from serin.store.receipt import Receipt
from serin.store.store import Store
from tests.fakes.live_quality import publish
from tests.kit.score_tables import Delta, Files, Sql, arrived
from tests.unit.serving import bundles

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_a_run_scores_new_files_and_a_changed_one_fails_it_by_name(home: Path, tmp_path: Path) -> None:
    publish(Store.open(), 0.0)
    rows, out = Files(tmp_path / "rows"), Files(tmp_path / "scored")
    rows.add(arrived(0, 50))
    assert asyncio.run(score(bundles.MODEL, rows.entry, out.entry)) == 50
    assert asyncio.run(score(bundles.MODEL, rows.entry, out.entry)) == 0
    rows.add(arrived(50, 70))
    assert asyncio.run(score(bundles.MODEL, rows.entry, out.entry)) == 70
    rows.add(arrived(0, 60))
    with pytest.raises(ScoringRefused, match=r"000\.parquet changed after being scored"):
        asyncio.run(score(bundles.MODEL, rows.entry, out.entry))
    assert sorted(out.read().column("row").to_pylist()) == list(range(120))


def test_a_run_scores_a_delta_table_into_a_database_and_leaves_its_receipt(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(Store.open(), 0.0)
    (tmp_path / "database").touch()
    monkeypatch.setenv("TEST_DATABASE", f"sqlite:///{tmp_path}/database")
    rows, out = Delta(str(tmp_path / "rows")), Sql("env:TEST_DATABASE", "scores")
    for first in (0, 50):
        rows.add(arrived(first, 50))
        assert asyncio.run(score(bundles.MODEL, rows.entry, out.entry)) == 50
    assert sorted(out.read().column("row").to_pylist()) == list(range(100))
    noted = [json.loads(path.read_text()) for path in (home / "stages" / "runs").glob("*.jsonl")]
    assert [entry["stage"] for entry in noted] == ["score", "score"]
    receipts = [Receipt.load_file(home / entry["receipt"]) for entry in noted]
    assert [receipt and receipt.rows for receipt in receipts] == [50, 50]
