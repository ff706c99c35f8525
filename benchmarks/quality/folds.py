"""Blocks of time for choosing settings: train on the rows before a block, judge on the block, leave test rows out."""

from __future__ import annotations

from pathlib import Path

from benchmarks.child import ROOT, ContenderFailed

SPEC = ROOT / "examples" / "flights" / "spec.yaml"


def make_folds(folder: Path, count: int) -> list[str]:
    """Builds datasets of the flights, the newest block first: that one is the example's own split.

    Each is built by the ETL, so that medians and vocabularies do not depend on the block. The rows after a block are
    called "test" in its dataset; only those of the first are ever read, by the benchmark itself.
    """
    from serin.etl.build import build_dataset
    from serin.spec.load import load_spec
    from serin.store.store import Store

    if not (SPEC.parent / "data" / "flights.parquet").exists():
        raise ContenderFailed(
            f"the flights are missing; run: python {SPEC.parent.relative_to(ROOT)}/fetch.py"
        )
    spec = load_spec(SPEC)
    store, paths = Store(str(folder / "store")), []
    for earlier in range(count):
        split = spec.data.split
        moved = split.model_copy(
            update={
                "train": round(split.train - earlier * split.valid, 6),
                "test": round(split.test + earlier * split.valid, 6),
            }
        )
        data = spec.data.model_copy(update={"split": moved})
        paths.append(build_dataset(data, spec.features, spec.etl, store=store).path)
    return paths
