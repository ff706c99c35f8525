"""The process that sends recorded requests to a candidate: `python -m serin.cluster.shadow.replay`, its job on stdin.

It writes one JSON line for each second of requests, or why there are none. Requests go to the candidate's Triton
itself, not through the gateway: they are in no request log and are not recorded as a client's. The candidate's bundle
is computed here, by ONNX Runtime, which the controller does not load.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from serin.cluster.shadow.compare import Answered, Ask, Columns, Compared, Comparison
from serin.cluster.shadow.process import Job
from serin.cluster.shadow.records import Place, Sample, draw
from serin.errors import PredictionFailed, SerinError
from serin.formats.captures import column_names
from serin.formats.schema import Schema
from serin.formats.serving.request_log import read_since
from serin.formats.wire import Array, to_wire
from serin.host.wiring import request_log
from serin.machine.parent_death import die_with_parent
from serin.rollout.decide.shadow import Batch
from serin.serving.client.client import Client
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.store.trust import find_trusted

LEAST_PER_S: Final = 20.0  # of a quiet live version; one at a time: a slow candidate is not overloaded

_BLOCK_S: Final = 1.0
_MOST_PER_S: Final = 500.0
_THREADS: Final = 8
_LOOK_S: Final = 2.0  # between looks for new records
_PACE_S, _PACE_EVERY_S = 5.0, 15.0  # of the log that tells the live version's pace; between two looks
_SAMPLE: Final = 4  # times the rows that the step needs

Answer = tuple[dict[str, Array] | None, float, str]  # outputs or None, microseconds, why there are none


def wire_columns(sample: Sample, schema: Schema) -> dict[str, Array]:
    """Returns the request columns of a sample in wire form. RowsUnfit names one that the records do not have."""
    names = column_names([column.name for column in schema.inputs])
    recorded = {
        name: sample.table.column(own) for name, own in names.items() if own in sample.table.column_names
    }
    return to_wire(sample.table.from_pydict(recorded), schema)


def compare_block(
    sample: Sample, first: int, columns: Columns, answers: Sequence[Answer], ask: Ask, against: Comparison
) -> Batch:
    """Returns what the answers to the requests from `first` on show."""
    answered = [first + index for index, (outputs, _, _) in enumerate(answers) if outputs is not None]
    failures = [why for outputs, _, why in answers if outputs is None]
    compared, segments, rows = Compared(), {}, 0
    if answered:
        spans = [np.arange(sample.starts[number], sample.starts[number + 1]) for number in answered]
        chosen = np.concatenate(spans)
        parts = [outputs for outputs, _, _ in answers if outputs is not None]
        seen = Answered(
            recorded=sample.table.take(chosen),
            request=np.repeat(answered, [len(span) for span in spans]),
            columns={name: values[chosen] for name, values in columns.items()},
            served={name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
        )
        compared, segments, rows = against.with_bundle(seen, ask), against.with_live(seen), len(chosen)
    return Batch(
        requests=len(answers),
        failed=len(failures),
        us=tuple(us for outputs, us, _ in answers if outputs is not None),
        rows=rows,
        compared=compared.compared,
        unsteady=compared.unsteady,
        segments=segments,
        place=asdict(sample.after(first + len(answers))),
        mismatch=compared.mismatch,
        failure=failures[0] if failures else "",
    )


class Sender:
    """Sends requests one by one at a pace, and takes their time."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="replay")

    def send(self, requests: Iterator[Columns], per_s: float) -> list[Answer]:
        """Returns the answers to the requests of one block, in their order. At the least pace one waits for another."""
        begin, work = time.monotonic(), list[Future[Answer]]()
        for number, request in enumerate(requests, start=1):
            work.append(self._pool.submit(self._timed, request))
            if per_s <= LEAST_PER_S:
                work[-1].result()
            time.sleep(max(0.0, begin + number / per_s - time.monotonic()))
            if time.monotonic() >= begin + _BLOCK_S:
                break
        return [answer.result() for answer in work]

    def _timed(self, request: Columns) -> Answer:
        began = time.perf_counter()
        try:
            outputs = self._ask(request)
        except PredictionFailed as error:
            return None, 0.0, str(error)
        return outputs, (time.perf_counter() - began) * 1e6, ""


class Pace:
    """How many requests to send per second: a share of those that the live version gets."""

    def __init__(self, log: Path, live: Release, share: float) -> None:
        self._log, self._live, self._share = log, live, share
        self._known, self._look_at = LEAST_PER_S, 0.0

    def per_s(self) -> float:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _PACE_EVERY_S
            recent = read_since(self._log, time.time() - _PACE_S) if self._log.exists() else []
            live_per_s = sum(request.release == self._live.name for request in recent) / _PACE_S
            self._known = min(max(LEAST_PER_S, self._share * live_per_s), _MOST_PER_S)
        return self._known


def replay(job: Job, against: Comparison, ask: Ask) -> Iterator[Mapping[str, Any]]:
    """Sends recorded requests as long as it is asked for more; yields a report after each block."""
    home, live, place = Path(job.home), Release.parse(job.replay.live), Place.from_json(job.place)
    sender, pace = Sender(ask), Pace(request_log(home), live, job.replay.share)
    while True:
        sample = draw(home, live, place, rows=_SAMPLE * job.replay.rows)
        if sample is None:
            yield {"waiting": f"no request of {live.name} is recorded yet" if place.until is None
                   else f"all recorded requests of {live.name} were sent; waiting for new ones"}  # fmt: skip
            time.sleep(_LOOK_S)
            continue
        columns = wire_columns(sample, against.schema)
        done = 0
        while done < len(sample):
            answers = sender.send(_requests(sample, columns, done), pace.per_s())
            batch = compare_block(sample, done, columns, answers, ask, against)
            done += len(answers)
            yield batch.to_json()
        place = sample.after(done)


def _requests(sample: Sample, columns: Columns, first: int) -> Iterator[Columns]:
    for number in range(first, len(sample)):
        begin, end = sample.starts[number], sample.starts[number + 1]
        yield {name: values[begin:end] for name, values in columns.items()}


def main() -> None:
    job = Job.load(sys.stdin.readline())
    die_with_parent(job.parent)
    candidate = Release.parse(job.replay.candidate)
    try:
        against = Comparison.of(Path(find_trusted(Store.open(), candidate.model, candidate.label).path))
        client = Client(
            job.address,
            candidate.model,
            version=candidate.version,
            timeout_s=job.replay.timeout_s,
            retries=0,
            batch_rows=job.replay.max_batch_rows,
        )
        for report in replay(job, against, lambda columns: client.predict_wire(columns, against.schema)):
            _tell(report)
    except SerinError as error:
        _tell({"unable": str(error)})


def _tell(report: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
