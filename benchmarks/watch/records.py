"""How fast the gateway's log is read, what recording costs the recorder's process, and how large the state becomes."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serin.formats.serving.request_log import START, read_requests
from serin.formats.serving.spool import spool_folder
from serin.formats.serving.spool_blocks import Recorded, encode_block, encode_header
from serin.monitoring.capture.merge import merge_parts
from serin.monitoring.capture.recorder import Recorder, request_table
from serin.monitoring.history.sketch import MINUTE_S, Series, Sketch, Tally, bins_of
from serin.monitoring.history.store import DAY_S, History
from serin.spec.monitoring import CaptureSpec

RELEASE = "model-v1"
REQUESTS_PER_S, TICK_S = 1000, 3
INPUTS = [
    *((f"number_{n}", "float", [1]) for n in range(10)),
    *((f"integer_{n}", "int", [1]) for n in range(5)),
    *((f"word_{n}", "string", [1]) for n in range(5)),
]
OUTPUTS = [("score", "FP32", [1])]
MODELS, DAYS = 100, 30
_BEGIN = 1_790_000_000.0
_LATENCIES = 600  # of a minute, so that its histogram is not empty in places


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    log_lines_per_s: float  # to objects, per second of CPU
    log_rows_per_s: float  # to an Arrow table
    recorder_share: float  # of one core, at REQUESTS_PER_S of one row with 20 columns
    merge_share: float
    bytes_per_row: float  # in the records, after merging
    history_bytes: float  # of MODELS with two releases each over DAYS


def measure_records(*, full: bool, say: Callable[[str], None]) -> Records:
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch:
        home = Path(scratch)
        say("records: reading the gateway's log")
        objects, rows = _read_speeds(home / "read.jsonl", 400_000 if full else 100_000)
        say("records: recording at 1,000 requests/s")
        recorder_s, merge_s, size = _record(home, 120 if full else 30)
        say("records: 30 days of history")
        history = _history_bytes(home, 4 if full else 2)
    return Records(
        log_lines_per_s=objects,
        log_rows_per_s=rows,
        recorder_share=recorder_s,
        merge_share=merge_s,
        bytes_per_row=size,
        history_bytes=history,
    )


def _log_line(number: int, t: float) -> str:
    fields = {
        "arm": "stable", "attempts": 1, "client_id": None, "code": 200, "epoch": 3, "flags": "-", "grpc": None,
        "id": f"2bd78f91-b507-4e93-9361-{number:012d}", "model": "model", "proto": "HTTP/1.1", "release": RELEASE,
        "t": f"{t:.6f}", "trace": None, "up_us": 1100 + number % 97, "us": 1500 + number % 113,
    }  # fmt: skip
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _read_speeds(log: Path, lines: int) -> tuple[float, float]:
    log.write_text("".join(_log_line(number, _BEGIN + number / 1000) for number in range(lines)))
    best_s = [float("inf"), float("inf")]
    for _ in range(3):
        began, offset, more = time.process_time(), START, True
        while more:
            batch = read_requests(log, offset, max_bytes=4 << 20)
            offset, more = batch.offset, batch.more
        best_s[0] = min(best_s[0], time.process_time() - began)
        data, began = log.read_bytes(), time.process_time()
        request_table(data)
        best_s[1] = min(best_s[1], time.process_time() - began)
    return lines / best_s[0], lines / best_s[1]


def _record(home: Path, seconds: int) -> tuple[float, float, float]:
    """CPU of the recorder and of merging per second of traffic, and the bytes of a row. Traffic is written beforehand;
    only the recorder's own work is measured."""
    draw = np.random.default_rng(0)
    head = encode_header(model="model", release=RELEASE, share=1.0, inputs=INPUTS, outputs=OUTPUTS)
    folder, log = spool_folder(home, RELEASE) / "0001-1-bench", home / "requests.jsonl"
    folder.mkdir(parents=True)
    recorder = Recorder(home, log, lambda _: CaptureSpec(share=1), settle_s=0.0)
    spent_s = 0.0
    for second in range(seconds):
        numbers = range(second * REQUESTS_PER_S, (second + 1) * REQUESTS_PER_S)
        with log.open("a") as lines:
            lines.write("".join(_log_line(n, _BEGIN + n / REQUESTS_PER_S) for n in numbers))
        block = encode_block([_request(n, draw) for n in numbers], sent=numbers.stop, dropped=0)
        path = folder / f"{second + 1:08d}.rows"
        path.write_bytes(head + block)
        os.utime(path, (_BEGIN + second + 1,) * 2)
        if (second + 1) % TICK_S == 0:
            began = time.process_time()
            recorder.record(_BEGIN + second + 1)
            spent_s += time.process_time() - began
    began = time.process_time()
    merge_parts(home, "model", _BEGIN + DAY_S)
    merge_s = time.process_time() - began
    size = sum(path.stat().st_size for path in home.rglob("*.parquet"))
    return spent_s / seconds, merge_s / seconds, size / (seconds * REQUESTS_PER_S)


def _request(number: int, draw: np.random.Generator) -> Recorded:
    numbers = [draw.normal(size=(1, 1)).astype(np.float32) for _ in range(10)]
    integers = [draw.integers(0, 10_000, size=(1, 1)) for _ in range(5)]
    words = [np.array([[b"word %d" % (number * k % 50)]], dtype=object) for k in range(5)]
    id_ = f"2bd78f91-b507-4e93-9361-{number:012d}".encode()
    t = _BEGIN + number / REQUESTS_PER_S
    return Recorded(t, id_, b"", 1, [*numbers, *integers, *words, np.ones((1, 1), np.float32)])


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
    read = f"{records.log_lines_per_s:,.0f} lines/s of one core (as a table: {records.log_rows_per_s:,.0f})"
    work = f"{records.recorder_share:.1%} of a core to record and {records.merge_share:.1%} to merge"
    return [
        "watch, the recorder and its state",
        f"  the gateway's log is read at {read}",
        f"  1,000 requests/s with 20 columns take {work}; {records.bytes_per_row:.0f} bytes a row",
        f"  the history of {MODELS} models over {DAYS} days takes {records.history_bytes / 1e6:,.0f} MB",
        "",
    ]


def last_line(records: Records) -> dict[str, float]:
    return {
        "log_lines_per_s": records.log_lines_per_s,
        "recorder_share": records.recorder_share,
        "history_mb": records.history_bytes / 1e6,
    }


def figures(records: Records) -> dict[str, Any]:
    return asdict(records)
