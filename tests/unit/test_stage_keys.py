"""What a stage depends on, and how it is told why one is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serin.spec.export import ExportSpec
from serin.spec.model import ModelSpec
from serin.store import stage_keys
from serin.store.stage_keys import StageKey, key_of, note, notes, remember, sources_digest, why

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
        "print(key_of('train', model=ModelSpec(hidden=(8,)), form=1).parts['model'])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == key_of("train", model=ModelSpec(hidden=(8,)), form=1).parts["model"]


def test_the_code_of_a_stage_is_part_of_its_key_and_that_of_another_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pattern in {pattern for patterns in stage_keys._SOURCES.values() for pattern in patterns}:
        path = tmp_path / pattern.replace("/**", "").replace("*", "work")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one = 1\n")
    monkeypatch.setattr(stage_keys, "__file__", str(tmp_path / "store" / "stage_keys.py"))

    def digests() -> dict[str, str]:
        sources_digest.cache_clear()
        return {stage: sources_digest(stage) for stage in ("etl", "train", "export")}

    before = digests()
    (tmp_path / "training" / "engine" / "work.py").write_text("one = 2\n")
    after = digests()
    sources_digest.cache_clear()
    assert {stage for stage in before if before[stage] != after[stage]} == {"train"}


def test_the_versions_that_matter_are_in_the_key() -> None:
    assert "onnxscript=" in key_of("export", form=1).parts["versions"]
    assert "onnxscript=" not in key_of("train", form=1).parts["versions"]


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
