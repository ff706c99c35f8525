"""`python -m tests.parity PLACE [SCENARIO ...] [--again]`: runs what has not passed yet, and writes the table."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from tests.cluster.part import run_prepared
from tests.parity.place import Place, machine
from tests.parity.run import PLACES, Cell, missing, run, store
from tests.parity.scenarios import SCENARIOS

_ISOLATED = "SERIN_PARITY_ISOLATED"
_PARTS = {
    "hosts": ("namespaces", "seaweedfs", "valkey"),
    "kubernetes": ("namespaces", "kubernetes", "seaweedfs"),
}


def open_place(name: str, folder: Path) -> AbstractContextManager[Place]:
    if name == "hosts":
        from tests.parity.hosts import hosts

        return hosts(folder)
    if name == "kubernetes":
        from tests.parity.kubernetes import kubernetes

        return kubernetes(folder)
    if name == "foreign":
        from tests.parity.foreign import foreign

        return foreign(folder)
    return machine(folder)


def main() -> int:
    asked = argparse.ArgumentParser(prog="make parity PLACE=", description=__doc__)
    asked.add_argument("place", choices=PLACES)
    asked.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    asked.add_argument("--again", action="store_true", help="also what has passed on this code")
    given = asked.parse_args()
    if unknown := [name for name in given.scenarios if name not in SCENARIOS]:
        asked.error(f"no scenario {unknown[0]!r}; there are: {', '.join(SCENARIOS)}")
    wanted = missing(given.place, given.scenarios, again=given.again)
    if not wanted:
        print("all of them have passed on this code; --again runs them once more")
        return 0
    if given.place in _PARTS and _ISOLATED not in os.environ:
        return run_prepared("tests.parity", _ISOLATED, *_PARTS[given.place])
    return _run(given.place, wanted)


def _run(name: str, wanted: list[str]) -> int:
    def keep(scenario: str, cell: Cell) -> None:
        print(f"{cell.seconds:6.1f} s  {cell.outcome:8} {scenario}{cell.why and ': '}{cell.why}", flush=True)
        store(name, scenario, cell)

    with tempfile.TemporaryDirectory(prefix="sp-") as folder, open_place(name, Path(folder)) as place:
        cells = run(place, wanted, keep)
    return 1 if any(cell.outcome == "failed" for cell in cells.values()) else 0


if __name__ == "__main__":
    for variable in [each for each in os.environ if each.startswith(("SERIN_", "PREFECT_"))]:
        if variable not in ("SERIN_TRITON", _ISOLATED, "SERIN_CLUSTER_PARTS"):
            del os.environ[variable]
    sys.exit(main())
