"""What evidence costs at three gateways and at one: the same requests, cut, sent and judged. The judgement is equal."""

from __future__ import annotations

import hashlib
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.race import Lap, Result, Unequal, race
from serin.cluster.agent.evidence import Progress, cut_evidence
from serin.formats.cluster.desired_state import DesiredState, EvidenceArm
from serin.formats.cluster.evidence import HostEvidence
from serin.formats.serving.request_log import START, read_requests
from serin.rollout.decide.blocks import Block
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold, fold_blocks
from serin.rollout.decide.plan import Plan

MODEL, CANDIDATE, STABLE, EPOCH, SHARE = "flights", "flights-v2", "flights-v1", 3, 0.25
GATEWAYS = 3
QUICK_LINES, FULL_LINES = 30_000, 600_000
_PER_S = 2_000
_BEGAN = 1_800_000_000
_PLAN = Plan()
_ARM = Arm(candidate=CANDIDATE, stable=STABLE, epoch=EPOCH, share=SHARE, since=EPOCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceCost:
    lines: int
    results: Mapping[str, Result]

    def lines_per_s(self, name: str) -> float:
        return self.lines / self.results[name].median_s


def measure_evidence(*, full: bool, say: Callable[[str], None]) -> EvidenceCost:
    lines = FULL_LINES if full else QUICK_LINES
    with tempfile.TemporaryDirectory(prefix="serin-scale-") as folder:
        logs = write_logs(Path(folder), lines)
        end = _BEGAN + lines / _PER_S + 60
        runners = {
            "three gateways": ("ours", _Runner(lambda: at_three_gateways(logs[1:], end))),
            "one gateway": ("peer", _Runner(lambda: at_one_gateway(logs[0], end))),
        }
        seen: set[str] = set()

        def accept(name: str, _: Mapping[str, Any], lap: Lap) -> None:
            seen.add(lap.answer["judgement"])
            if len(seen) > 1:
                raise Unequal(f"{name} judges the same requests in another way")

        return EvidenceCost(lines=lines, results=race(runners, lambda *_: {}, accept, say=say))


class _Runner:
    """CPU seconds: gateways and controller are different machines, and share these cores here."""

    def __init__(self, judge: Callable[[], Evidence]) -> None:
        self._judge = judge

    def run(self, request: Mapping[str, Any]) -> Lap:
        del request
        began = time.process_time()
        evidence = self._judge()
        seconds = time.process_time() - began
        told = json.dumps(evidence.to_json(), sort_keys=True).encode()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer = {"judgement": hashlib.sha256(told).hexdigest(), "compared": evidence.compared}
        return Lap(seconds=seconds, peak_bytes=peak, answer=answer)


def at_one_gateway(log: Path, end: float) -> Evidence:
    """As the controller of one machine: it reads the gateway's log."""
    return judge_log(log, Evidence(), end)


def judge_log(log: Path, evidence: Evidence, end: float | None = None) -> Evidence:
    """Adds all lines of a file, as many at a time as the controller reads. `end`: no more will come."""
    offset, more = START, True
    while more:
        batch = read_requests(log, offset)
        offset, more = batch.offset, batch.more
        evidence = fold(evidence, batch.requests, arm=_ARM, plan=_PLAN, now=None if more else end)
    return evidence


def at_three_gateways(logs: Sequence[Path], end: float) -> Evidence:
    """As three agents, which send blocks, and the controller, which adds them."""
    arm = EvidenceArm(
        rollout="r",
        candidate=CANDIDATE,
        stable=STABLE,
        since_epoch=EPOCH,
        since_t=0.0,
        shares={EPOCH: SHARE},
        plan=_PLAN.to_json(),
    )
    desired = DesiredState(seq=1, term=1, by="benchmark", t=0.0, arms={MODEL: arm})
    sent = [
        cut_evidence(Progress(), desired, host=f"host-{number}", in_force=1, request_log=log, now=end).pending
        for number, log in enumerate(logs)
    ]
    received = [HostEvidence.load(content.encode()) for content in sent if content is not None]
    found = [each.models[MODEL] for each in received]
    blocks = [(second, Block.from_json(block)) for each in found for second, block in each.blocks]
    return fold_blocks(
        Evidence(),
        blocks,
        arm=_ARM,
        plan=_PLAN,
        newest=max(each.newest for each in found),
        complete_to=min(each.complete_to for each in received),
    )


def write_logs(folder: Path, lines: int) -> list[Path]:
    """Writes all requests to one log, and the same ones to three, as a load balancer spreads them."""
    rng = np.random.default_rng(7)
    us = np.round(rng.lognormal(7.0, 0.4, lines)).astype(int).tolist()
    candidate = (rng.random(lines) < SHARE).tolist()
    gateway = rng.integers(GATEWAYS, size=lines).tolist()
    paths = [folder / "all.jsonl", *(folder / f"gateway-{number}.jsonl" for number in range(GATEWAYS))]
    with _opened(paths) as files:
        for number in range(lines):
            line = _line(number, us[number], candidate[number])
            files[0].write(line)
            files[1 + gateway[number]].write(line)
    return paths


def write_log(path: Path, *, first: int, lines: int) -> None:
    """Writes a file of a log that is rotated, which begins with the request of this number."""
    rng = np.random.default_rng(first)
    us = np.round(rng.lognormal(7.0, 0.4, lines)).astype(int).tolist()
    candidate = (rng.random(lines) < SHARE).tolist()
    with path.open("w", encoding="utf-8") as file:
        file.writelines(_line(first + index, us[index], candidate[index]) for index in range(lines))


def _line(number: int, us: int, candidate: bool) -> str:
    """In the form that Envoy writes."""
    document = {
        "arm": "candidate" if candidate else "stable",
        "attempts": 1,
        "caller": None,
        "client_id": None,
        "code": 200,
        "epoch": EPOCH,
        "flags": "-",
        "grpc": None,
        "id": f"{number:08x}-9939-4b18-86b3-06b2702a651c",
        "model": MODEL,
        "ms": round((us + 250) / 1000),
        "proto": "HTTP/1.1",
        "received_ms": 0,
        "release": CANDIDATE if candidate else STABLE,
        "t": f"{_BEGAN + number / _PER_S:.6f}",
        "trace": None,
        "up_us": us,
        "us": us + 150,
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


@contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[list[Any]]:
    files = [path.open("w", encoding="utf-8") for path in paths]
    try:
        yield files
    finally:
        for file in files:
            file.close()
