"""examples/payments: the world that it makes up, its clients, and the windows that it compares served ones with."""

import importlib
import json
import re
import subprocess
import sys
import threading
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pandas as pd
import pytest

from tests.kit.waiting import until
from tests.kit.web import Handler, web_server

FOLDER = Path(__file__).parents[2] / "examples" / "payments"
FIRST = date(2026, 1, 1)
WRITE = """
import sys
from pathlib import Path
from datetime import date
import world
made, folder = world.World(first=date(2026, 1, 1), per_day=40), Path(sys.argv[1])
world.write_payments(made.payments(0, 60), folder / "payments.parquet", made.moment(60))
world.write_merchants(made.merchant_table(60), folder / "merchants.parquet")
"""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("world")


def test_a_seed_gives_the_same_bytes_and_another_one_others(world: Any, tmp_path: Path) -> None:
    """Also in another process, whose strings have other hashes."""
    folders = [tmp_path / name for name in ("here", "there", "other")]
    for folder in folders:
        folder.mkdir()
    for folder, seed in ((folders[0], 7), (folders[2], 8)):
        made = world.World(first=FIRST, seed=seed, per_day=40)
        world.write_payments(made.payments(0, 60), folder / "payments.parquet", made.moment(60))
        world.write_merchants(made.merchant_table(60), folder / "merchants.parquet")
    subprocess.run([sys.executable, "-c", WRITE, str(folders[1])], cwd=FOLDER, check=True)
    here, there, other = ([path.read_bytes() for path in sorted(folder.iterdir())] for folder in folders)
    assert here == there
    assert not set(here) & set(other)


def test_the_first_days_are_the_same_however_many_are_drawn(world: Any) -> None:
    made = world.World(first=FIRST, per_day=50)
    pd.testing.assert_frame_equal(made.payments(0, 4), made.payments(0, 9).head(len(made.payments(0, 4))))
    later = made.payments(4, 9)
    assert later["payment"].tolist() == made.payments(0, 9)["payment"].tolist()[-len(later) :]


def test_payments_have_an_id_each_and_come_in_the_order_of_time(world: Any) -> None:
    found = world.World(first=FIRST).payments(0, 30)
    assert found["payment"].is_unique
    assert found["at"].is_monotonic_increasing
    assert not found.duplicated(["card", "at"]).any()
    late = found["known"] - found["at"]
    assert late.min() >= pd.Timedelta(days=2)
    assert late.max() <= pd.Timedelta(days=6)


def test_the_fraud_changes_with_the_new_way_of_paying(world: Any) -> None:
    made = world.World(first=FIRST, change=20)
    before, after = made.payments(0, 20), made.payments(20, 40)
    assert "wallet" not in set(before["channel"])
    assert 0.3 < (after["channel"] == "wallet").mean() < 0.5
    assert set(before["channel"][before["fraud"]]) == {"online"}
    frauds = after[after["fraud"]]
    assert (frauds["channel"] == "wallet").mean() > 0.7
    assert frauds["amount"].median() < before["amount"][before["fraud"]].median() / 5


def test_the_risk_of_merchants_changes_on_the_day_that_they_are_taken_over(world: Any) -> None:
    made = world.World(first=FIRST, taken_over=10)
    first, then = made.merchant_table(9), made.merchant_table(10)
    assert first["merchant"].tolist() == then["merchant"].tolist()
    risky = set(then["merchant"][then["risk"] > 0.1])
    assert not risky & set(first["merchant"][first["risk"] > 0.1])
    frauds = made.payments(10, 40).query("fraud")
    assert frauds["merchant"].isin(risky).mean() > 0.9


def test_the_bank_s_table_holds_no_label_that_is_not_known_yet(world: Any, tmp_path: Path) -> None:
    made = world.World(first=FIRST, per_day=50)
    payments, now = made.payments(0, 10), made.moment(10)
    world.write_payments(payments, tmp_path / "payments.parquet", now)
    written = pd.read_parquet(tmp_path / "payments.parquet")
    assert written["payment"].tolist() == payments["payment"].tolist()
    assert (written["fraud"].isna() == (payments["known"] > now)).all()
    assert written["fraud"].notna().any()
    assert [path.name for path in tmp_path.iterdir()] == ["payments.parquet"]


def test_windows_are_sums_over_the_hour_and_the_day_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    run = importlib.import_module("run")
    minutes = [0, 30, 60, 61, 24 * 60 + 30]
    payments = pd.DataFrame(
        {
            "payment": list("abcde"),
            "card": ["c1", "c1", "c1", "c2", "c1"],
            "at": pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(minutes, unit="min"),
            "amount": np.array([1.5, 2.25, 4.0, 9.0, 1.0], np.float32),
        }
    )
    found = run.windows_of(payments).set_index("payment").sort_index()
    assert found["payments_1h"].tolist() == [0, 1, 2, 0, 0]
    assert found["payments_1d"].tolist() == [0, 1, 2, 0, 2]
    assert found["spent_1d"].fillna(-1).tolist() == [-1, 1.5, 3.75, -1, 6.25]
    assert found["largest_1d"].fillna(-1).tolist() == [-1, 1.5, 2.25, -1, 4.0]


class Counting(Handler):
    """Keeps what was asked for, and fails every payment of the card c0003."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    asked: dict[str, list[int]]
    under_way: set[str]
    overlapped = False

    def do_POST(self) -> None:
        body = json.loads(self.read_body())
        values = {each["name"]: each["data"][0] for each in body["inputs"]}
        card = values["card"]
        with Counting.lock:
            Counting.overlapped |= card in Counting.under_way
            Counting.under_way.add(card)
            Counting.asked[card].append(values["at"])
        assert body["id"] == values["payment"]
        with Counting.lock:
            Counting.under_way.remove(card)
        self.answer(b"{}", 503 if card == "c0003" else 200)


def test_terminals_keep_the_order_of_a_card_count_failures_and_pause(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "asked", defaultdict(list), raising=False)
    monkeypatch.setattr(Counting, "under_way", set(), raising=False)
    payments = world.World(first=FIRST, cards=9, per_day=60).payments(0, 3)
    terminals = importlib.import_module("terminals").Terminals
    with web_server(Counting) as port, terminals(f"127.0.0.1:{port}", "m", payments, 2000.0) as made:
        made.resume()
        until(lambda: made.sent > 40, "payments are sent")
        made.pause()
        asked = sum(map(len, Counting.asked.values()))
        assert asked == made.sent == made.answered + sum(made.failures.values())
        with terminals(f"127.0.0.1:{port}", "m", payments, 2000.0) as idle:
            pass
        assert idle.sent == idle.answered == 0
        made.resume()
        until(lambda: made.is_over, "all are sent")
        made.pause()
    times = payments["at"].astype("int64")
    for card, own in Counting.asked.items():
        assert own == times[payments["card"] == card].tolist()
    assert not Counting.overlapped
    assert made.failures == {"503": int((payments["card"] == "c0003").sum())}
    assert made.at == payments["at"].iloc[-1]


def test_the_page_tells_what_the_rows_say(world: Any) -> None:
    """Version 1 finds no fraud after the change, version 2 finds all of them and refuses one honest payment."""
    page = importlib.import_module("page")
    made = world.World(first=FIRST, per_day=30, change=20, taken_over=5)
    rows = made.payments(0, 40)
    rows = rows.assign(day=made.day_of(rows["at"]), seconds=np.arange(len(rows)) / 50.0, _latency_ms=2.5)
    for name in page.WINDOWS:
        rows[name] = np.arange(len(rows)) % 4
    rows["_release"] = np.select(
        [rows["day"] < 10, rows["day"] < 30], ["payments-v1", "payments-v1e2"], "payments-v2"
    )
    newer = rows["_release"] == "payments-v2"
    rows["score"] = np.where(rows["fraud"] & ((rows["day"] < 20) | newer), 0.75, 0.25)
    rows.loc[rows.index[newer & ~rows["fraud"]][0], "score"] = 0.75
    rows["taken_over"] = rows["fraud"]
    told = page.Told(
        rows=rows,
        marks={"lookup refreshed": 10.0, "change": 20.0, "alarm": 25.0, "canary": 28.0, "version 2": 30.0},
        failures=0,
        equal=(5 * len(rows), 0),
        seconds=200.0,
        alarm=("channel drifted", "see `serin drift` & <more>"),
        refused=rows[newer & rows["fraud"]].iloc[0],
        reason={
            "contributions": {"amount": 2.0, "risk": -0.5},
            "values": {"amount": "9"},
            "base": -1.0,
            "margin": 0.5,
        },
        before=np.full(int(newer.sum()), 0.25),
        report="rollout.html",
    )
    text = page.payments_page(told)
    assert f"<b>{len(rows):,}</b><span>payments answered" in text
    assert "see <code>serin drift</code> &amp; &lt;more&gt;" in text
    gained = text.partition("What the new version gains")[2]
    assert '<td>version 1</td><td class="n">0.0%</td><td class="n">0.00%</td>' in gained
    assert '<td>version 2</td><td class="n">100.0%</td>' in gained
    assert "payments-v1e2: " in text.partition("The list of merchants")[2]
    assert not re.search(r"\bnan\b", text)
    assert not re.search(r"<script|https?://(?!www\.w3\.org)|src=", text)
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(drawing)


def test_a_run_removes_no_folder_of_another(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--out /` must not remove /home."""
    run = importlib.import_module("run")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine").touch()
    monkeypatch.setattr(run.Story, "serin", lambda *_: None)
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: None)

    def tell(story: Any) -> None:
        with run.stack(story):
            assert not story.home.exists()

    monkeypatch.setattr(run, "tell", tell)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setenv("SERIN_HOME", "restored after the test")
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path)])
    assert run.main() == 0
    assert (tmp_path / "home" / "mine").exists()
