from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.child import Child, ContenderFailed


def contender(folder: Path, source: str) -> dict[str, str]:
    (folder / "contender_in_a_test.py").write_text(source, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


def test_a_contender_answers_its_requests_and_its_time_leaves_the_preparation_out(tmp_path: Path) -> None:
    environment = contender(
        tmp_path,
        "import time\n"
        "calls, clock = [], time.perf_counter\n"
        "def prepare(request): time.perf_counter = lambda: clock() + 3600; calls.append('prepare')\n"
        "def run(request): print('noise'); calls.append('run'); return {'calls': list(calls), 'n': request['n']}\n",
    )
    with Child("contender_in_a_test", python=sys.executable, threads=1, environment=environment) as child:
        first, second = child.run({"n": 1}), child.run({"n": 2})
    assert first.answer == {"calls": ["prepare", "run"], "n": 1}
    assert second.answer == {"calls": ["prepare", "run", "run"], "n": 2}
    assert first.seconds < 3600
    assert 0 < first.cpu_s < 60
    assert first.peak_bytes > 1_000_000
    assert child.versions["numpy"]


def test_a_contender_that_dies_says_why(tmp_path: Path) -> None:
    environment = contender(tmp_path, "def run(request): raise RuntimeError('out of luck')\n")
    with (
        Child("contender_in_a_test", python=sys.executable, threads=1, environment=environment) as child,
        pytest.raises(ContenderFailed, match="out of luck"),
    ):
        child.run({})
