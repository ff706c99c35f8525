"""python -m benchmarks.gpu.placed: `serin run --placed` on the table with strings, first cold and then warm.

The table has 6 M rows and 23 columns. A stack is started, and the pipeline runs twice on it without serving; the second
run does every stage again. Shown for each: the seconds of the command and of its stages, how busy their devices were,
and the longest waits. Works without a GPU, too: then with `--rows 100000`. Installs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.etl.ours import spec_of
from benchmarks.etl.string_table import write_string_table
from benchmarks.orchestration.place import Place, stack_in
from benchmarks.report import last_line
from serin.store.receipt import Receipt

RUNS = ("cold", "warm")
STAGES = ("etl", "train", "export")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.placed", description=__doc__)
    parser.add_argument("--rows", type=int, default=6_000_000)
    parser.add_argument("--kind", default="mlp", help="model.kind of the spec (default: mlp)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="a folder on a fast disk (default: the system's)")
    chosen = parser.parse_args()
    line: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="serin-placed-", dir=chosen.scratch) as scratch:
        spec = write_spec(Path(scratch), chosen.rows, chosen.kind, chosen.epochs)
        with stack_in(Path(scratch), say) as place:
            for name in RUNS:
                fresh = [word for stage in STAGES for word in ("--fresh", stage)] if name != RUNS[0] else []
                seconds, _ = place.run("serin.cli", "run", "--placed", "--no-serve", *fresh, str(spec))
                line |= {f"{name}_s": seconds, **show_run(place, name, seconds)}
    print(last_line(line))
    return 0


def write_spec(folder: Path, rows: int, kind: str, epochs: int) -> Path:
    """Writes the table and the pipeline's spec; returns the spec's path."""
    case = write_string_table(folder / "table", rows)
    sections = spec_of(case.request, "auto", "auto").model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    training = {"seed": 1} if kind == "xgboost" else {"epochs": epochs, "seed": 1}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({**sections, "model": {"kind": kind}, "training": training}))
    say(f"{rows:,} rows written")
    return path


def show_run(place: Place, name: str, seconds: float) -> dict[str, float]:
    """Prints the newest pipeline run of the stack; returns its figures."""
    runs = json.loads(place.run("serin.cli", "runs", "list", "--json")[1])
    newest = next(run["name"] for run in runs if run["kind"] == "pipeline")
    details = json.loads(place.run("serin.cli", "runs", "show", newest, "--json")[1])
    say(f"{name}: {seconds:.1f} s, the run itself {details['seconds']:.1f} s")
    figures: dict[str, float] = {}
    for stage, receipt in _receipts(place.folder / "home", details["stages"]).items():
        busy = [cost.busy_share for cost in receipt.device if cost.busy_share is not None]
        figures[f"{name}_{stage}_s"] = receipt.seconds
        figures |= {f"{name}_{stage}_busy": sum(busy) / len(busy)} if busy else {}
        figures |= {f"{name}_{stage}_mfu": receipt.mfu} if receipt.mfu is not None else {}
        device = ", ".join(cost.name for cost in receipt.device)
        share = f"{sum(busy) / len(busy):.0%} busy" if busy else "busy share unknown"
        say(f"  {stage}: {receipt.seconds:.1f} s on {device}, {share}")
        for wait in receipt.waits:
            say(f"    waited: {wait}")
    for wait in details["waits"]:
        say(f"  longest waits: {wait}")
    return figures


def _receipts(home: Path, stages: list[dict[str, Any]]) -> dict[str, Receipt]:
    found = {
        stage["stage"]: Receipt.load_file(home / stage["receipt"]) for stage in stages if stage.get("receipt")
    }
    return {stage: receipt for stage, receipt in found.items() if receipt is not None}


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
