"""Checks that the GPU engines give the CPU's digest: awkward tables, every relational operation, several splits."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from serin.errors import SerinError
from serin.etl.build import build_dataset
from serin.etl.engines.cuda_cluster import gpu_cluster
from serin.spec.etl import EtlSpec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store
from tests.fakes.awkward_tables import write_awkward_tables, write_awkward_variants
from tests.logs import heard

FAILURES = (
    SerinError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
CUTS: dict[int, tuple[int | None, ...]] = {40: (None, 1), 6_000: (None, 700), 300_000: (None, 5_000)}
Case = tuple[str, PipelineSpec, int | None]


def equality(folder: Path, engine: str) -> int:
    """Returns how many runs on this engine failed or gave another digest than the CPU."""
    tables, variants = list(_tables(folder)), list(_variants(folder))
    if engine != "dask-cuda":
        return _count(folder, engine, [*tables, *variants])
    with gpu_cluster(1, folder / "cluster") as address:  # one for all runs: it takes seconds to start
        return _count(folder, engine, tables[-2:-1]) + _count(folder, address, [*tables[:-1], *variants])


def _count(folder: Path, engine: str, cases: Sequence[Case]) -> int:
    return sum(_differs(folder / name, name, spec, engine, piece_rows) for name, spec, piece_rows in cases)


def _tables(folder: Path) -> Iterator[Case]:
    for rows, cuts in CUTS.items():
        spec = write_awkward_tables(folder / f"tables-{rows}", rows)
        yield from ((f"{rows}", spec, piece_rows) for piece_rows in cuts)


def _variants(folder: Path) -> Iterator[Case]:
    for name, spec in write_awkward_variants(folder / "tables-variants", 9_000).items():
        yield from ((name, spec, piece_rows) for piece_rows in (None, 1_500))


def _differs(folder: Path, name: str, spec: PipelineSpec, engine: str, piece_rows: int | None) -> bool:
    expected = _digest(folder / "host", spec, "process", None)
    begin = time.perf_counter()
    said: list[str] = []
    try:
        found = _digest(folder / f"{_named(engine)}-{piece_rows}", spec, engine, piece_rows, said)
    except FAILURES as error:  # one failure must not hide the results of the others
        found = f"{type(error).__name__}: {error}"
        traceback.print_exception(error, limit=-8)
    word = "equal" if found == expected else f"DIFFERENT: {found[:300]}"
    seconds = time.perf_counter() - begin
    print(f"{name:>9}, {_named(engine):<10} pieces {piece_rows!s:>6}: {word} ({seconds:.2f} s)", flush=True)
    notes = [line for line in said if "no cluster" in line or "memory ran out" in line or "full" in line]
    for line in notes:
        print(f"    {line[:400]}")
    if found != expected and len(found) == 64:
        _show_difference(folder / "host", folder / f"{_named(engine)}-{piece_rows}")
    return found != expected or bool(notes)


def _named(engine: str) -> str:
    return "scheduler" if "://" in engine else engine


def _digest(
    folder: Path, spec: PipelineSpec, engine: str, piece_rows: int | None, said: list[str] | None = None
) -> str:
    say = (said if said is not None else []).append
    etl = EtlSpec(engine=engine)
    store = Store(str(folder))
    with heard(say):
        return build_dataset(spec.data, spec.features, etl, store=store, piece_rows=piece_rows).digest


def _show_difference(host: Path, gpu: Path) -> None:
    """Prints the first columns whose bits differ, or the fitted numbers that do."""
    left, right = (next(folder.glob("**/dataset.json")).parent for folder in (host, gpu))
    for file in sorted(path for path in left.rglob("*") if path.is_file()):
        other = right / file.relative_to(left)
        if file.suffix not in (".f32", ".i32", ".i64") and file.name not in ("features.json", "dataset.json"):
            continue
        one, two = file.read_bytes(), other.read_bytes() if other.exists() else b""
        if one != two:
            place = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), -1)
            print(f"    {file.relative_to(left)} differs at byte {place} of {len(one)} and {len(two)}")
            if file.suffix == ".json":
                print(f"    {one[place - 80 : place + 40]!r}\n    {two[place - 80 : place + 40]!r}")
