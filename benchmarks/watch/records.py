"""How fast the gateway's log is read, what recording costs the recorder's process, and how large the state becomes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale.evidence_load import write_log
from serin.formats.schema import InputColumn, Schema, outputs_of
from serin.formats.serving.request_log import START, read_requests
from serin.monitoring.capture.merge import merge_parts
from serin.monitoring.capture.recorder import Plan, Recorder
from serin.monitoring.history.sketch import MINUTE_S, Series, Sketch, Tally, bins_of
from serin.monitoring.history.store import DAY_S, History
from serin.spec.monitoring import CaptureSpec
from tests.kit.decoding import built_decoder
from tests.kit.rings import Exchange, RingWriter, binary_body, json_answer, json_request

RELEASE = "model-v1"
REQUESTS_PER_S, TICK_S = 1000, 3
SCHEMA = Schema(
    task="binary",
    inputs=(
        *(InputColumn(name=f"number_{n}", dtype="FP32", kind="float") for n in range(10)),
        *(InputColumn(name=f"integer_{n}", dtype="INT64", kind="int") for n in range(5)),
        *(InputColumn(name=f"word_{n}", dtype="BYTES", kind="string") for n in range(5)),
    ),
    outputs=outputs_of("binary"),
)
FORMS = {"binary": 1, "json": 1, "binary_64": 64, "json_64": 64}  # rows of a request
MODELS, DAYS = 100, 30
_BEGIN = 1_790_000_000.0
_LATENCIES = 600  # of a minute, so that its histogram is not empty in places


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    log_lines_per_s: float  # to objects, per second of CPU
    recorder_share: float  # of one core, at REQUESTS_PER_S of one row with 20 columns
    row_us: dict[str, float]  # CPU of the recorder per row, by the form of requests
    merge_share: float
    bytes_per_row: float  # in the records, after merging
    history_bytes: float  # of MODELS with two releases each over DAYS


def measure_records(*, full: bool, say: Callable[[str], None]) -> Records:
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch:
        home = Path(scratch)
        say("records: reading the gateway's log")
        objects = _read_speed(home / "read.jsonl", 400_000 if full else 100_000)
        row_us = {}
        for form in reversed(FORMS):
            say(f"records: recording 1,000 rows/s, {form}")
            own = home / form
            own.mkdir()
            recorder_s, merge_s, size = _record(own, 120 if full else 30, form)
            row_us[form] = recorder_s / (REQUESTS_PER_S // FORMS[form] * FORMS[form]) * 1e6
        say("records: 30 days of history")
        history = _history_bytes(home, 4 if full else 2)
    return Records(
        log_lines_per_s=objects,
        recorder_share=recorder_s,
        row_us=row_us,
        merge_share=merge_s,
        bytes_per_row=size,
        history_bytes=history,
    )


def _read_speed(log: Path, lines: int) -> float:
    write_log(log, first=0, lines=lines)
    best_s = float("inf")
    for _ in range(3):
        began, offset, more = time.process_time(), START, True
        while more:
            batch = read_requests(log, offset, max_bytes=4 << 20)
            offset, more = batch.offset, batch.more
            assert not batch.bad_lines, "these are not lines that Envoy writes"
        best_s = min(best_s, time.process_time() - began)
    return lines / best_s


def _record(home: Path, seconds: int, form: str) -> tuple[float, float, float]:
    """CPU of the recorder and of merging per second of traffic, and the bytes of a row. Traffic is written beforehand;
    only the recorder's own work is measured."""
    rows = FORMS[form]
    sent = [_exchange(number, form) for number in range(REQUESTS_PER_S // rows)]
    ring = RingWriter(home, capacity=64 << 20)
    plan = Plan(schema=SCHEMA, settings=CaptureSpec(share=1))
    recorder = Recorder(home, lambda _: plan, built_decoder())
    spent_s = 0.0
    for second in range(seconds):
        for each in sent:
            written = ring.write(replace(each, t=_BEGIN + second, id=f"{second:08d}-{each.id}"))
            assert written, "the ring is large enough"
        if (second + 1) % TICK_S == 0:
            began = time.process_time()
            recorder.record(_BEGIN + second + 1)
            spent_s += time.process_time() - began
    began = time.process_time()
    merge_parts(home, "model", _BEGIN + DAY_S)
    merge_s = time.process_time() - began
    size = sum(path.stat().st_size for path in home.rglob("*.parquet"))
    ring.end()
    return spent_s / seconds, merge_s / seconds, size / (seconds * len(sent) * rows)


def _exchange(number: int, form: str) -> Exchange:
    """A request with 20 columns."""
    rows, draw = FORMS[form], np.random.default_rng(number)
    columns: dict[str, tuple[str, tuple[int, int], list[Any]]] = {}
    for each in SCHEMA.inputs:
        if each.kind == "float":
            values = draw.normal(size=rows).astype(np.float32).tolist()
        elif each.kind == "int":
            values = draw.integers(0, 10_000, rows).tolist()
        else:
            values = [f"word {word}" for word in draw.integers(0, 50, rows)]
        columns[each.name] = each.dtype, (rows, 1), values
    answers = {"score": ("FP32", (rows, 1), draw.normal(size=rows).astype(np.float32).tolist())}
    known: dict[str, Any] = {"t": 0.0, "id": f"b507-4e93-9361-{number:012d}", "release": RELEASE}
    if form.startswith("json"):
        return Exchange(request=json_request(columns), answer=json_answer(answers), **known)
    (request, length), (answer, end) = binary_body("inputs", columns), binary_body("outputs", answers)
    return Exchange(request=request, answer=answer, request_json=length, answer_json=end, **known)


def _history_bytes(home: Path, models: int) -> float:
    """The bytes of MODELS, from the growth of the file with the first few."""
    history, sizes = History(home), []
    draw = np.random.default_rng(1)
    latencies = [_sketch(draw) for _ in range(50)]
    for number in range(models):
        for day in range(DAYS):
            starts = range(int(_BEGIN) + day * DAY_S, int(_BEGIN) + (day + 1) * DAY_S, MINUTE_S)
            for release in ("stable", "candidate"):
                series = Series(f"model-{number}", f"model-{number}-v{day // 7 + 1}", release)
                history._add({(series, start): _tally(latencies[start % 50]) for start in starts})  # noqa: SLF001
            for _ in range(8):
                history.tidy(_BEGIN + (day + 1) * DAY_S)
        history._db.execute("VACUUM")  # noqa: SLF001
        history._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # noqa: SLF001
        sizes.append((home / "history" / "history.sqlite").stat().st_size)
    history.close()
    return (sizes[-1] - sizes[0]) / (models - 1) * MODELS


def _sketch(draw: np.random.Generator) -> Sketch:
    bins, counts = np.unique(bins_of(draw.lognormal(8.0, 0.4, _LATENCIES)), return_counts=True)
    return Sketch(bins, counts)


def _tally(latency: Sketch) -> Tally:
    return Tally(requests=latency.total, errors=1, saved=0, slow=2, refused=0, latency=latency)


def table(records: Records) -> list[str]:
    read = f"{records.log_lines_per_s:,.0f} lines/s of one core"
    work = f"{records.recorder_share:.1%} of a core to record and {records.merge_share:.1%} to merge"
    forms = ", ".join(f"{us:.1f} us as {form}" for form, us in records.row_us.items())
    return [
        "watch, the recorder and its state",
        f"  the gateway's log is read at {read}",
        f"  1,000 requests/s with 20 columns take {work}; {records.bytes_per_row:.0f} bytes a row",
        f"  a row takes {forms}",
        f"  the history of {MODELS} models over {DAYS} days takes {records.history_bytes / 1e6:,.0f} MB",
        "",
    ]


def last_line(records: Records) -> dict[str, float]:
    return {
        "log_lines_per_s": records.log_lines_per_s,
        "recorder_share": records.recorder_share,
        **{f"recorder_row_us_{form}": us for form, us in records.row_us.items()},
        "history_mb": records.history_bytes / 1e6,
    }


def figures(records: Records) -> dict[str, Any]:
    return asdict(records)
