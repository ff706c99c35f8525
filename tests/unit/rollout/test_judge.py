from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serin.formats.serving.request import Request
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.decide.verdict import Verdict
from serin.rollout.run.judge import LogJudge
from serin.rollout.run.record import decision2rollout, rollout2decision
from serin.store.artifacts import Release
from tests.fakes.traffic import Traffic

V1, V2 = Release(model="flights", version=1), Release(model="flights", version=2)
T = 1000.0
SHIFTING = Rollout(
    id="r1",
    candidate=V2,
    stable=V1,
    previous=None,
    plan=Plan(
        steps=(50.0, 100.0), step_s=10.0, min_requests=20, max_error_share=0.1, bake_s=60.0, warmup_s=0.0
    ),
    phase=Phase.SHIFTING,
    step=0,
    epoch=4,
    began=T,
    since=T,
    evidence_from=T,
    evidence_epoch=4,
)


def write(log: Path, *times: float, **changes: Any) -> None:
    with log.open("a") as file:
        for t in times:
            fields: dict[str, Any] = {
                "t": f"{t:.6f}", "model": "flights", "epoch": 4, "arm": "candidate", "release": "flights-v2",
                "code": 200, "grpc": None, "us": 1500, "up_us": 1100, "attempts": 1, "flags": "-",
                "proto": "HTTP/1.1", "id": "a",
            }  # fmt: skip
            file.write(json.dumps(fields | changes) + "\n")


def write_both(log: Path, *times: float, **changes: Any) -> None:
    """One request of each arm at each time; what `changes` says is the candidate's."""
    for t in times:
        write(log, t, **changes)
        write(log, t + 0.0107, arm="stable", release="flights-v1")


def test_a_step_passes_when_the_log_shows_enough_good_requests(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write(log, *(T - 5 + i for i in range(3)), code=500, epoch=3)
    write_both(log, *(T + i / 4 for i in range(20)))
    judge, now = LogJudge(log), replace(SHIFTING, plan=replace(SHIFTING.plan, steps=(50.0, 80.0, 100.0)))
    assert judge.judge(now, T + 5).verdict is Verdict.WAIT
    assert judge.judge(now, T + 10).verdict is Verdict.PASS


def test_the_last_step_before_all_traffic_asks_for_proof(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write_both(log, *(T + i / 4 for i in range(20)))
    found = LogJudge(log).judge(SHIFTING, T + 10)
    assert found.verdict is Verdict.WAIT
    assert found.reason.startswith("waiting for evidence that p50 and p95 are slower by at most 20% (")


def test_evidence_resumes_exactly_from_the_journal(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    judge, now = LogJudge(log), SHIFTING
    for second in range(8):
        write_both(log, T + second, T + second + 0.5, code=500 if second == 2 else 200)
        found = judge.judge(now, T + second + 1)
        line = rollout2decision(replace(now, evidence=found.evidence), T)
        now, judge = (
            decision2rollout(replace(line, evidence=json.loads(json.dumps(line.evidence)))),
            LogJudge(log),
        )
    assert now.evidence == LogJudge(log).judge(SHIFTING, T + 8).evidence
    assert LogJudge(log).judge(now, T + 60).evidence["guards"]["candidate"] == [16, 2, 0, 0]


def test_a_failing_candidate_fails_at_once(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write_both(log, *(T + i / 4 for i in range(40)), attempts=2)
    found = LogJudge(log).judge(SHIFTING, T + 10)
    assert found.verdict is Verdict.FAIL
    assert found.reason.startswith("more than 10% of its requests fail; ")


def test_a_missing_log_means_no_traffic(tmp_path: Path) -> None:
    assert LogJudge(tmp_path / "none.jsonl").judge(SHIFTING, T + 20).verdict is Verdict.NO_TRAFFIC


def test_a_log_that_cannot_be_read_is_an_incident_and_loses_no_evidence(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write(log, T + 1)
    now = replace(SHIFTING, evidence=LogJudge(log).judge(SHIFTING, T + 2).evidence)
    log.unlink()
    log.mkdir()
    found = LogJudge(log).judge(now, T + 3)
    assert (found.verdict, found.evidence) == (Verdict.INCIDENT, now.evidence)


def test_a_bake_is_judged_by_the_rules_of_the_bake(tmp_path: Path) -> None:
    now = replace(SHIFTING, phase=Phase.BAKING, step=1, epoch=5)
    assert LogJudge(tmp_path / "none.jsonl").judge(now, T + 61).verdict is Verdict.NO_TRAFFIC
    log = tmp_path / "requests.jsonl"
    write(log, T + 1, epoch=5)
    assert LogJudge(log).judge(now, T + 61).verdict is Verdict.PASS


def test_bad_lines_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write(log, T + 1)
    with log.open("a") as file:
        file.write("garbage\n")
    assert LogJudge(log).judge(SHIFTING, T + 2).evidence["bad_lines"] == 1


def test_a_busy_log_is_read_and_judged_faster_than_it_grows(tmp_path: Path) -> None:
    """50,000 lines a second are wanted of one core that has nothing else to do; a tenth of that would still do."""
    log = tmp_path / "requests.jsonl"
    write_both(log, *(T + i / 500 for i in range(10_000)))
    began = time.process_time()
    found = LogJudge(log).judge(SHIFTING, T + 60)
    lines_per_s = 20_000 / (time.process_time() - began)
    assert found.evidence["guards"]["candidate"][0] == 10_000
    assert lines_per_s > 5_000, f"{lines_per_s:.0f} lines/s"


@pytest.mark.parametrize("seed", range(3))
def test_a_judge_that_is_killed_at_any_moment_comes_to_the_same_evidence(tmp_path: Path, seed: int) -> None:
    """It goes on from what was journaled last, while the log has grown in pieces that end anywhere in a line."""
    draw = random.Random(seed)
    requests = Traffic(requests_per_s=30, slower=1.4, errors=(0.01, 0.05), epoch=4).requests(T, 15, seed=seed)
    lines = [json.dumps(dict(zip(Request._fields, line, strict=True))) + "\n" for line in requests]
    data = "".join(lines).encode()
    log = tmp_path / "requests.jsonl"
    now = journaled = SHIFTING
    written = kills = 0
    while written < len(data):
        written = min(written + draw.randrange(1, 6000), len(data))
        log.write_bytes(data[:written])
        if draw.random() < 0.3:
            now, kills = journaled, kills + 1
        now = replace(now, evidence=LogJudge(log).judge(now, T).evidence)
        if draw.random() < 0.3:
            line = rollout2decision(now, T)
            journaled = decision2rollout(replace(line, evidence=json.loads(json.dumps(line.evidence))))
    assert kills > 1
    calm = LogJudge(log).judge(SHIFTING, T + 60)
    found = LogJudge(log).judge(now, T + 60)
    assert json.dumps(found.evidence["guards"]) == json.dumps(calm.evidence["guards"])
    assert (found.verdict, found.reason) == (calm.verdict, calm.reason)
