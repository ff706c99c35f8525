"""`python -m tests.ways PLACE [CASE ...] [--again]`: runs what has not gone well on this code, writes the tables."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from tests.cluster.part import run_prepared
from tests.ways.design import PLACES, Case, cases
from tests.ways.place import Place, machine
from tests.ways.run import ROOT, Cell, missing, run, store

_ISOLATED = "SERIN_WAYS_ISOLATED"
_PARTS = {
    "host": ("namespaces", "seaweedfs"),
    "slurm": ("namespaces", "seaweedfs", "slurm"),
    "kubernetes": ("namespaces", "kubernetes", "seaweedfs"),
}


def open_place(name: str, folder: Path) -> AbstractContextManager[Place]:
    if name == "host":
        from tests.ways.host import host

        return host(folder)
    if name == "slurm":
        from tests.ways.slurm import slurm

        return slurm(folder)
    if name == "kubernetes":
        from tests.ways.kubernetes import kubernetes

        return kubernetes(folder)
    return machine(folder)


def main() -> int:
    asked = argparse.ArgumentParser(prog="make ways PLACE=", description=__doc__)
    asked.add_argument("place", choices=PLACES)
    asked.add_argument("cases", nargs="*", metavar="CASE", help="such as 'run module'")
    asked.add_argument("--again", action="store_true", help="also what went well on this code")
    given = asked.parse_args()
    known = [case.name for case in cases() if case.place == given.place]
    if unknown := [name for name in given.cases if name not in known]:
        asked.error(f"no case {unknown[0]!r} there; there are: {', '.join(known)}")
    wanted = missing(given.place, given.cases, again=given.again)
    if not wanted:
        print("all of them went well on this code; --again runs them once more")
        return 0
    if given.place in _PARTS and _ISOLATED not in os.environ:
        return run_prepared("tests.ways", _ISOLATED, *_PARTS[given.place])
    return _run(given.place, wanted)


def _run(name: str, wanted: list[Case]) -> int:
    def keep(case: Case, cell: Cell) -> None:
        word = f"{cell.seconds:6.1f} s  {cell.outcome:9} exit {cell.exit}  {case.name}"
        print(f"{word}{cell.said and ': '}{cell.said}", flush=True)
        store(case, cell)

    with tempfile.TemporaryDirectory(prefix="sw-") as folder, open_place(name, Path(folder)) as place:
        logs = ROOT / "build" / "ways" / name
        return 0 if run(place, wanted, logs, keep) else 1


if __name__ == "__main__":
    for variable in [each for each in os.environ if each.startswith(("SERIN_", "PREFECT_"))]:
        if variable not in ("SERIN_TRITON", _ISOLATED, "SERIN_CLUSTER_PARTS"):
            del os.environ[variable]
    sys.exit(main())
