"""python -m tests.soak.messages: 100,000 messages of gRPC that two readers could take differently.

Each is read by the gateway's compiled filter (under AddressSanitizer and UBSan), by the script that does the same (in
Envoy's own Lua) and by protobuf. Some go through real gateways with a key for one of two models. Fails when a message
was read otherwise than by protobuf, when one that protobuf itself wrote was refused, or when a call was answered for
another model than the key's.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.lua_in_envoy import lua_reader
from tests.e2e.message_readers import Compared, Reader, compare, packed
from tests.e2e.smuggling import guarded
from tests.unit.serving.compiled_reader import build_reader, run_reader

ROUND = 5000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.messages", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=5000, help="through each of two gateways")
    parser.add_argument("--number", type=int, default=random.randrange(10**6), help="of the first round")
    chosen = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="serin-fuzz-") as folder, lua_reader() as script:
        program = Path(folder) / "reader"
        build_reader(program)
        readers: dict[str, Reader] = {
            "compiled": lambda texts: [lines[1:] for lines in run_reader(program, packed(texts))],
            "script": script.read,
        }
        for name, read in readers.items():
            wrong += _read(name, read, chosen.number, chosen.messages)
    for compiled in (True, False):
        began = time.monotonic()
        with guarded(compiled=compiled) as door:
            found = door.smuggle(chosen.number, chosen.calls)
        statuses = dict(sorted(found.statuses.items()))
        print(
            f"calls compiled={compiled} {statuses} wrong={len(found.wrong)} seconds={time.monotonic() - began:.0f}"
        )
        wrong += found.wrong
    for text in wrong[:20]:
        print(f"WRONG: {text}")
    return int(bool(wrong))


def _read(name: str, read: Reader, number: int, messages: int) -> list[str]:
    total, began = Compared(), time.monotonic()
    for index in range(0, messages, ROUND):
        found = compare(read, number=number + index, count=min(ROUND, messages - index))
        for key in ("messages", "equal", "refused", "plain", "wrong"):
            setattr(total, key, getattr(total, key) + getattr(found, key))
    print(f"{name}: number={number} {total} seconds={time.monotonic() - began:.0f}", flush=True)
    return total.wrong


if __name__ == "__main__":
    sys.exit(main())
