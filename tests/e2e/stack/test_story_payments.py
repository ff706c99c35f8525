"""examples/payments on a real stack: what its page claims about windows, editions, labels and reasons.

The alarm and the retraining, which take minutes, are those of test_stack_watch.py. Other tests of this folder expect a
stack without its model: it comes after them.
"""

import importlib
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import serin
from serin.formats.trained import read_trained
from serin.spec.yaml_file import read_yaml
from tests.e2e.whole_stack import Stack

FOLDER = Path(__file__).parents[3] / "examples" / "payments"
LIVE_DAYS = 4


def check_retraining(story: Any, rows: pd.DataFrame, windows: Sequence[str]) -> None:
    """The recorded windows train the same model, byte for byte, as windows that the ETL computes from the whole table.
    Its rows before the first request have no label then, so that both learn from the same rows."""
    whole = story.seen[story.seen["at"] <= rows["at"].max()]
    of_requests = whole["payment"].isin(rows["payment"])
    tables = {"whole": whole.assign(fraud=whole["fraud"].where(of_requests)), "recorded": rows}
    changes = {"whole": {}, "recorded": {"windows": [], "events": None}}
    models = {}
    for name, table in tables.items():
        table.to_parquet(story.folder / f"{name}.parquet")
        spec = read_yaml((story.folder / "spec.yaml").read_text())
        files = {
            "payments": f"{story.folder}/{name}.parquet",
            "merchants": f"{story.folder}/merchants.parquet",
        }
        spec["data"] |= {"tables": files, "allow_leaks": list(windows), **changes[name]}
        spec["model"]["rounds"] = 8
        spec["name"] = f"payments-{name}"
        pipeline = serin.Pipeline(spec)
        pipeline.build_dataset()
        models[name] = read_trained(Path(pipeline.train().path))[1]
    assert models["whole"] == models["recorded"]


def test_the_first_days_of_the_example_are_as_its_page_says(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name, value in stack.environment.items():
        monkeypatch.setenv(name, value)
    run = importlib.import_module("run")
    first = datetime.now(UTC).date() - timedelta(days=run.HISTORY_DAYS + run.STREAM_DAYS + 5)
    world = importlib.import_module("world").World(first=first, per_day=70, cards=60, taken_over=46)
    story = run.Story(folder=tmp_path, home=stack.home, world=world)
    story.prepare()
    story.first_version()
    with story.terminals() as terminals:
        story.replay_to(terminals, run.HISTORY_DAYS + LIVE_DAYS / 2)
        story.refresh(terminals)
        story.replay_to(terminals, run.HISTORY_DAYS + LIVE_DAYS)
        rows = story.collect(terminals)
        page = story.write_page(terminals, rows)
    assert terminals.failures == {}
    assert len(rows) == terminals.answered > 100
    assert set(rows["_release"]) == {"payments-v1", "payments-v1e2"}
    assert story.different_windows(rows) == 0
    assert (rows["payments_1h"] > 0).any()
    spoilt = rows.assign(payments_1h=rows["payments_1h"] + (rows.index == 0))
    assert story.different_windows(spoilt) == 1

    check_retraining(story, rows, run.WINDOWS)
    (live,) = stack.ask("quality", run.MODEL)["releases"]
    assert live["labelled"] == live["recorded"] == len(rows)
    refused = run.refused_payment(rows)
    reason = story.explain(refused)
    assert reason["base"] + sum(reason["contributions"].values()) == pytest.approx(reason["margin"], abs=1e-3)
    assert 1 / (1 + math.exp(-reason["margin"])) == pytest.approx(refused["score"], abs=1e-3)
    text = page.read_text()
    for said in (
        "What was stopped",
        "The windows of one card",
        "The reason of one refusal",
        "payments-v1e2: ",
    ):
        assert said in text
    assert "The alarm" not in text
