"""What a stage depends on, and the small files by which it finds what it did before."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serin.spec.export import ExportSpec
from serin.spec.model import ModelSpec
from serin.store.artifacts import Bundle, Checkpoint
from serin.store.stage_keys import StageKey, key_of, note, notes, remember, why
from serin.store.stage_results import find_result, keep_result, one_at_a_time
from tests.logs import heard

ROOT = Path(__file__).resolve().parents[2]
KEY = StageKey(
    stage="export", parts={"model": "a", "export": "b", "sources": "c", "versions": "onnx=1.0 torch=2.0"}
)


def changed(**parts: str) -> StageKey:
    return StageKey(stage="export", parts={**KEY.parts, **parts})


def test_every_part_makes_another_key() -> None:
    keys = [KEY, *(changed(**{part: "other"}) for part in KEY.parts)]
    assert len({key.digest for key in keys}) == 5


def test_a_key_follows_from_what_the_sections_say() -> None:
    key = key_of("export", model=ModelSpec(hidden=(8,)), export=ExportSpec())
    assert key == key_of("export", model=ModelSpec(hidden=(8,), kind="mlp"), export=ExportSpec())
    other = key_of("export", model=ModelSpec(hidden=(9,)), export=ExportSpec())
    assert {part for part in key.parts if key.parts[part] != other.parts[part]} == {"model"}


def test_another_process_makes_the_same_key() -> None:
    program = (
        "from serin.spec.model import ModelSpec; from serin.store.stage_keys import key_of; "
        "print(key_of('train', model=ModelSpec(hidden=(8,))).parts['model'])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == key_of("train", model=ModelSpec(hidden=(8,))).parts["model"]


def test_the_versions_that_matter_are_in_the_key() -> None:
    assert "onnxscript=" in key_of("export").parts["versions"]
    assert "onnxscript=" not in key_of("train").parts["versions"]


@pytest.mark.parametrize(
    ("key", "fresh", "words"),
    [
        (KEY, True, "asked for by --fresh"),
        (KEY, False, "its result is gone"),
        (changed(export="x"), False, "changed since the last time: export"),
        (changed(sources="x"), False, "changed since the last time: Serin's code for it"),
        (
            changed(versions="onnx=1.1 torch=2.0"),
            False,
            "changed since the last time: versions of libraries (onnx=1.0 -> onnx=1.1)",
        ),
    ],
)
def test_the_reason_names_what_has_changed(tmp_path: Path, key: StageKey, fresh: bool, words: str) -> None:
    assert why(tmp_path, "flights", KEY) == "no earlier result"
    remember(tmp_path, "flights", KEY)
    assert why(tmp_path, "flights", key, fresh=fresh) == words
    assert why(tmp_path, "parcels", KEY) == "no earlier result"


def test_the_last_outcome_of_each_stage_of_a_run_counts(tmp_path: Path) -> None:
    note(tmp_path, "run-1", "etl", ran=False, why="made before")
    note(tmp_path, "run-1", "train", ran=True, why="no earlier result")
    note(tmp_path, "run-1", "train", ran=False, why="trained before")
    with (tmp_path / "stages" / "runs" / "run-1.jsonl").open("a") as file:
        file.write('{"stage": "expo')
    assert notes(tmp_path, "run-1") == [
        {"stage": "etl", "ran": False, "why": "made before"},
        {"stage": "train", "ran": False, "why": "trained before"},
    ]
    assert notes(tmp_path, "run-2") == []


CHECKPOINT = Checkpoint(path="/runs/train-1/result", step=12, metrics={"valid_auc": 0.75})


def test_what_was_kept_is_found_by_its_stage_key_and_kind_alone(tmp_path: Path) -> None:
    keep_result(tmp_path, "train", "abc", CHECKPOINT)
    assert find_result(tmp_path, "train", "abc", Checkpoint) == CHECKPOINT
    assert find_result(tmp_path, "train", "abd", Checkpoint) is None
    assert find_result(tmp_path, "export", "abc", Checkpoint) is None
    assert find_result(tmp_path, "train", "abc", Bundle) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"path": "/x"}', '{"path": 1, "step": "a", "metrics": 2}']
)
def test_a_damaged_result_counts_as_none(tmp_path: Path, content: str) -> None:
    keep_result(tmp_path, "train", "abc", CHECKPOINT)
    (tmp_path / "stages" / "train" / "abc.json").write_text(content)
    assert find_result(tmp_path, "train", "abc", Checkpoint) is None


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
