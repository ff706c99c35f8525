"""The last lines of a pipeline's log, from what its version holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serin.stack.prefect.run_summary import summary
from serin.store.artifacts import Release
from serin.store.store import Store

GATE = {"test_onnx": {"logloss": 0.25, "auc": 0.91}, "test_rows": 12345}
COMPARED = {
    "live_version": 1,
    "overall": {"rows": 500},
    "reason": "auc 0.9100 against 0.9000, better by 0.0100",
    "approved_by": None,
}


def publish(**files: dict[str, Any]) -> Release:
    store = Store.open()
    with store.workspace() as folder:
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        (folder / "manifest.json").write_text("{}")
        bundle = store.publish_bundle("flights", store.reserve_version("flights"), folder)
    return Release(model="flights", version=bundle.version)


def test_a_first_version_has_nothing_to_be_compared_with(home: Path) -> None:
    release = publish(gate=GATE, champion={"live_version": None, "reason": "there is no live model"})
    assert summary(home, release, served=True) == [
        "flights version 1 is live",
        "auc 0.9100, logloss 0.2500 on 12,345 test rows",
        "there was no live version to compare it with",
        "try it: serin predict flights ROWS.csv (its columns: serin models show flights)",
        "next: serin status, serin rollout report flights",
    ]


@pytest.mark.parametrize(
    ("champion", "line"),
    [
        (COMPARED, "compared with version 1: auc 0.9100 against 0.9000, better by 0.0100"),
        (
            COMPARED | {"overall": None, "reason": "the target changed"},
            "not compared with version 1: the target changed",
        ),
        (
            COMPARED | {"reason": "overall auc 0.5000 against 0.9000", "approved_by": "Ada"},
            "compared with version 1: overall auc 0.5000 against 0.9000; approved by Ada",
        ),
    ],
)
def test_a_version_that_is_not_served_names_the_command_that_serves_it(
    champion: dict[str, Any], line: str, home: Path
) -> None:
    assert summary(home, publish(gate=GATE, champion=champion), served=False) == [
        "flights version 1 is published, not served",
        "auc 0.9100, logloss 0.2500 on 12,345 test rows",
        line,
        "next: serin rollout start flights 1",
    ]


def test_a_version_without_metrics_says_none(home: Path) -> None:
    assert summary(home, publish(gate={"test_onnx": {}, "test_rows": 0}), served=False) == [
        "flights version 1 is published, not served",
        "next: serin rollout start flights 1",
    ]
