"""python -m tests.soak.messages: 100,000 messages of gRPC that two readers could take differently, and JSON bodies.

Each is read by the gateway's request filter (under AddressSanitizer and UBSan) and by protobuf. Some go through a real
gateway with a key for one of two models. Fails when a message was read otherwise than by protobuf, when one that
protobuf itself wrote was refused, or when a call was answered for another model than the key's.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e import fuzz_json
from tests.e2e.message_readers import Compared, Reader, compare, packed
from tests.e2e.smuggling import guarded
from tests.unit.serving.compiled_reader import build_reader, run_reader

ROUND = 5000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.messages", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=5000, help="through a gateway")
    parser.add_argument("--number", type=int, default=random.randrange(10**6), help="of the first round")
    chosen = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="serin-fuzz-") as folder:
        program = Path(folder) / "reader"
        build_reader(program)
        wrong += _read(
            lambda texts: [lines[1:3] for lines in run_reader(program, packed(texts))],
            chosen.number,
            chosen.messages,
        )
        wrong += _rewritten(
            lambda texts: [lines[3] for lines in run_reader(program, packed(texts))],
            chosen.number,
            chosen.messages,
        )
    began = time.monotonic()
    with guarded() as gateway:
        found = gateway.smuggle(chosen.number, chosen.calls)
    statuses = dict(sorted(found.statuses.items()))
    print(f"calls {statuses} wrong={len(found.wrong)} seconds={time.monotonic() - began:.0f}")
    wrong += found.wrong
    for text in wrong[:20]:
        print(f"WRONG: {text}")
    return int(bool(wrong))


def _rewritten(rewrite: fuzz_json.Rewrite, number: int, bodies: int) -> list[str]:
    """JSON bodies whose nulls are written out, against Python's json."""
    total, began = fuzz_json.Compared(), time.monotonic()
    for index in range(0, bodies, ROUND):
        fuzz_json.compare(rewrite, number + index, min(ROUND, bodies - index), total)
    print(f"bodies: number={number} {total.counts} seconds={time.monotonic() - began:.0f}", flush=True)
    return total.wrong


def _read(read: Reader, number: int, messages: int) -> list[str]:
    total, began = Compared(), time.monotonic()
    for index in range(0, messages, ROUND):
        found = compare(read, number=number + index, count=min(ROUND, messages - index))
        for key in ("messages", "equal", "refused", "plain", "wrong"):
            setattr(total, key, getattr(total, key) + getattr(found, key))
    print(f"messages: number={number} {total} seconds={time.monotonic() - began:.0f}", flush=True)
    return total.wrong


if __name__ == "__main__":
    sys.exit(main())
