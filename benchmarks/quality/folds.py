"""Blocks of time to choose by: trained on what was before a block, judged on the block. Test rows stay out."""

from __future__ import annotations

from pathlib import Path

from benchmarks.child import ROOT, ContenderFailed

SPEC = ROOT / "examples" / "flights" / "spec.yaml"


def make_folds(folder: Path, count: int) -> list[str]:
    """Datasets of the flights, the newest block first: that one is the example's own split.

    Each is made by the ETL, so that medians and vocabularies know nothing of the block. What comes after a block is
    called "test" in its dataset; only the first one's is ever looked at, by the benchmark itself.
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
