"""The small files by which a stage finds what it did before."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from serin.store.artifacts import Bundle, Checkpoint
from serin.store.stage_results import find_result, keep_result, one_at_a_time
from tests.logs import heard

CHECKPOINT = Checkpoint(path="/runs/train-1/result", step=12, metrics={"valid_auc": 0.75})


def test_what_was_kept_is_found(tmp_path: Path) -> None:
    keep_result(tmp_path, "train", "abc", CHECKPOINT)
    assert find_result(tmp_path, "train", "abc", Checkpoint) == CHECKPOINT


def test_nothing_is_found_for_another_key_or_stage(tmp_path: Path) -> None:
    keep_result(tmp_path, "train", "abc", CHECKPOINT)
    assert find_result(tmp_path, "train", "abd", Checkpoint) is None
    assert find_result(tmp_path, "export", "abc", Checkpoint) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"path": "/x"}', '{"path": 1, "step": "a", "metrics": 2}']
)
def test_a_damaged_result_counts_as_none(tmp_path: Path, content: str) -> None:
    keep_result(tmp_path, "train", "abc", CHECKPOINT)
    (tmp_path / "stages" / "train" / "abc.json").write_text(content)
    assert find_result(tmp_path, "train", "abc", Checkpoint) is None


def test_a_result_of_another_kind_counts_as_none(tmp_path: Path) -> None:
    keep_result(tmp_path, "export", "abc", CHECKPOINT)
    assert find_result(tmp_path, "export", "abc", Bundle) is None


def test_a_newer_result_replaces_the_older_and_leaves_no_scratch_file(tmp_path: Path) -> None:
    keep_result(tmp_path, "train", "abc", CHECKPOINT)
    newer = Checkpoint(path="/runs/train-2/result", step=13, metrics={})
    keep_result(tmp_path, "train", "abc", newer)
    assert find_result(tmp_path, "train", "abc", Checkpoint) == newer
    assert [path.name for path in (tmp_path / "stages" / "train").iterdir()] == ["abc.json"]


def test_a_second_run_of_the_same_waits_for_the_first(tmp_path: Path) -> None:
    said: list[str] = []
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with one_at_a_time(tmp_path, "train", "abc"):
            order.append("second")

    def listen(text: str) -> None:
        said.append(text)
        waits.set()

    thread = threading.Thread(target=second)
    with heard(listen), one_at_a_time(tmp_path, "train", "abc"):
        thread.start()
        assert waits.wait(60)
        with one_at_a_time(tmp_path, "train", "other"):
            order.append("another key")
        order.append("first")
    thread.join(60)
    assert order == ["another key", "first", "second"]
    assert said == ["another run does the same train; waiting for it"]


def test_a_run_that_is_asked_to_stop_does_not_wait_any_longer(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with (
        one_at_a_time(tmp_path, "train", "abc"),
        one_at_a_time(tmp_path, "train", "abc", stop=stop),
    ):
        pass
