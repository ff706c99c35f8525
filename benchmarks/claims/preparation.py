"""The claim about time: how much of a pipeline's is data preparation, by the receipts of its stages."""

from __future__ import annotations

from pathlib import Path

from benchmarks.claims.claim import Claim
from benchmarks.claims.trainings import Place
from benchmarks.runtime.bundles import make_table, spec_of
from serin.pipeline.run_stage import run_etl, run_export, run_train
from serin.spec.load import load_spec
from serin.store.receipt import Receipt

EPOCHS = (1, 20)


def preparation(folder: Path, place: Place) -> Claim:
    """One dataset, trained for few and for many epochs, and exported. SERIN_HOME is in `folder`."""
    rows = 400_000 if place == "cuda" else 60_000
    path = folder / "rows.parquet"
    make_table(path, rows)
    cases, lines, figures, etl = {}, [], {}, None
    for epochs in EPOCHS:
        given = spec_of(path, [256, 128], 1, ["fp32"])
        given["training"] |= {"epochs": epochs, "batch_rows": 8192 if place == "cuda" else 1024}
        spec = load_spec(given)
        prepared = run_etl(spec)
        etl = etl or prepared.receipt
        receipts = (etl, run_train(spec).receipt, run_export(spec).receipt)
        seconds = [_seconds(receipt) for receipt in receipts]
        share = seconds[0] / sum(seconds)
        name = "1 epoch" if epochs == 1 else f"{epochs} epochs"
        cases[name] = share >= 0.7
        figures[f"etl_share_{epochs}"] = share
        lines.append(
            f"{rows:,} rows, {name}: ETL {seconds[0]:.1f} s, training {seconds[1]:.1f} s, export "
            f"{seconds[2]:.1f} s: {share:.0%} in data preparation"
        )
    says = "70% of the time is data preparation (of the machine's)"
    return Claim(name="preparation", says=says, cases=cases, lines=lines, figures=figures)


def _seconds(receipt: Receipt | None) -> float:
    assert receipt is not None, "the stage did its work"
    return receipt.seconds
