"""python -m benchmarks.quality.partial FILE: the table of a run that was cut off, from the data sets it finished."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.quality.benchmark import NETWORK, show_table, summary
from benchmarks.quality.data_sets import DataSet, task_of


def main() -> None:
    scores = json.loads(Path(sys.argv[1]).read_text())["scores"]
    names = {name for found in scores.values() for name in found if name != NETWORK}
    whole = {data: found for data, found in scores.items() if names <= set(found)}
    metrics = {data: DataSet(name=data, task=task_of(data), folder="", rows=0).metric for data in whole}
    print("\n".join(show_table(whole, metrics)))
    print(" ".join(f"{key}={value:.4g}" for key, value in summary(whole).items()))


if __name__ == "__main__":
    main()
