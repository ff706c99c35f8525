"""The runner of `make gpu-test` on small programs instead of GPU tests: outcomes, goals, deadlines, the kept result."""

import json
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.__main__ import kind_of
from benchmarks.gpu.parts import BENCHMARKS, parts_of_tests
from benchmarks.gpu.versions import show_versions
from benchmarks.suite.__main__ import NAMES
from benchmarks.suite.__main__ import parts_of as suite_parts
from benchmarks.suite.parts import Goal, Outcome, Part, read_figures
from benchmarks.suite.runner import Kept, run_parts
from benchmarks.suite.table import show_table

FACTS = {"date": "2026-11-16T12:00:00+00:00", "commit": "abc"}
TESTS = """
import pytest

def test_passes(): pass

@pytest.mark.skip(reason="no GPU")
def test_skipped(): pass

@pytest.mark.alone
def test_alone(): assert {alone}
"""


def run(parts: list[Part], folder: Path, *, seconds: float = 300.0) -> dict[str, Outcome]:
    result = Kept(parts, path=folder / "results" / "gpu-x.json", head=FACTS)
    (folder / "logs").mkdir()
    run_parts(parts, result, folder / "logs", at_once=2, deadline=time.monotonic() + seconds)
    print(show_table(result.outcomes, {part.name: part for part in parts}))
    print(show_versions(FACTS, {"gpu": ["X"], "torch": "2"}))
    kept = json.loads(result.path.read_text())
    assert [found["name"] for found in kept["parts"]] == [found.name for found in result.outcomes]
    assert (kept["commit"], kept["date"]) == (FACTS["commit"], FACTS["date"])
    return {outcome.name: outcome for outcome in result.outcomes}


def test_files_are_split_by_what_needs_the_gpu_alone_and_failures_are_told(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS.format(alone="1 + 1 == 3"))
    parts = parts_of_tests(tmp_path)
    assert [(part.name, part.alone) for part in parts] == [("test_one", False), ("test_one, alone", True)]
    (tmp_path / "test_whole.py").write_text(
        "import pytest\npytest.importorskip('no_such_module', reason='missing')\n"
    )
    parts = parts_of_tests(tmp_path)
    found = run(parts, tmp_path)
    assert (found["test_one"].result, found["test_one"].detail) == ("passed", "1 passed, 1 skipped (no GPU)")
    assert (found["test_whole"].result, found["test_whole"].detail) == ("skipped", "1 skipped (missing)")
    assert found["test_one, alone"].result == "failed"
    assert "1 failed" in found["test_one, alone"].detail
    assert "assert (1 + 1) == 3" in found["test_one, alone"].detail


def test_a_failed_file_of_tests_is_kept_beside_a_benchmark_of_the_same_subject(tmp_path: Path) -> None:
    (tmp_path / "test_training.py").write_text("def test_fails(): assert False\n")
    benchmark = Part(name="training", command=("-c", "print('limit=1.0')"), alone=True)
    parts = [*parts_of_tests(tmp_path), benchmark]
    found = run(parts, tmp_path)
    assert {name: one.result for name, one in found.items()} == {
        "test_training": "failed",
        "training": "passed",
    }
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").glob("*.log")}
    assert "1 failed" in logs["test_training.log"]
    assert logs["training.log"] == "limit=1.0\n"


def test_the_parts_of_both_suites_have_names_and_files_of_their_own(tmp_path: Path) -> None:
    for parts in ([*parts_of_tests(), *BENCHMARKS], suite_parts(NAMES)):
        Kept(parts, path=tmp_path / "x.json", head={})
    for twin in ("etl.gpu", "etl gpu"):
        with pytest.raises(ValueError, match="the same name or the same files: etl"):
            Kept([*BENCHMARKS, Part(name=twin, command=())], path=tmp_path / "x.json", head={})


def test_a_benchmark_is_held_to_its_goals(tmp_path: Path) -> None:
    program = ("-c", "print('limit=0.5 tax=0.01')")
    parts = [
        Part(name="met", command=program, goals={"limit": Goal(least=0.4), "tax": Goal(most=0.03)}),
        Part(name="missed", command=program, goals={"limit": Goal(least=0.9)}),
        Part(name="without", command=program, goals={"other": Goal(least=1)}),
        Part(name="broken", command=("-c", "raise SystemExit('no figures')")),
    ]
    found = run(parts, tmp_path)
    results = {name: outcome.result for name, outcome in found.items()}
    assert results == {"met": "passed", "missed": "goal missed", "without": "failed", "broken": "failed"}
    assert found["met"].figures == {"limit": 0.5, "tax": 0.01}
    assert "no figure for other" in found["without"].detail
    assert "no figures" in found["broken"].detail


def test_what_takes_too_long_is_ended_and_the_rest_is_reported_as_not_run(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    slow = (
        f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    parts = [
        Part(name="slow", command=("-c", slow)),
        Part(name="later", command=("-c", "print()"), alone=True),
    ]
    found = run(parts, tmp_path, seconds=1.0)
    assert {name: outcome.result for name, outcome in found.items()} == {
        "slow": "timed out",
        "later": "not run",
    }
    assert not pid.exists() or not psutil.pid_exists(int(pid.read_text()))


def test_figures_are_those_of_the_last_line_and_a_machine_has_one_name() -> None:
    assert read_figures("limit=1\nround 3\ncudf=1.8 m_rows_per_s=15.7 tax=-0.002\n\n") == {
        "cudf": 1.8,
        "m_rows_per_s": 15.7,
        "tax": -0.002,
    }
    assert read_figures("") == {}
    assert kind_of(["NVIDIA H200"]) == "nvidia-h200"
    assert kind_of(["NVIDIA H200"] * 8) == "8x-nvidia-h200"


def test_every_benchmark_can_be_started_and_all_files_of_gpu_tests_are_found() -> None:
    assert {part.name for part in BENCHMARKS} >= {"training", "parallel", "etl.gpu"}
    assert {"test_training", "test_whole_chain"} <= {part.name for part in parts_of_tests()}
