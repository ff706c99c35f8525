"""duckdb: joins, statistics and codes in SQL, with arrays fetched at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from benchmarks.etl.outputs import SPLITS, split_ends, write_split


def run(request: dict[str, Any]) -> dict[str, Any]:
    case = request["case"]
    with duckdb.connect(config={"threads": request["threads"]}) as database:
        database.execute("set timezone = 'UTC'")
        _load(database, case, request["decode"])
        _vocabularies(database, case)
        columns = _made(database, case)
    categorical = [*case["categorical"], f"{case['time']}_hour", f"{case['time']}_weekday"]
    out = Path(request["out"])
    for number, split in enumerate(SPLITS):
        of_split = columns["split"] == number
        write_split(
            out,
            split,
            numeric=np.stack([columns[name][of_split] for name in case["numeric"]], axis=1),
            codes=np.stack([columns[f"code_{name}"][of_split] for name in categorical], axis=1),
            target=columns["target"][of_split],
            rows=columns["row"][of_split],
        )
    return {"path": str(out), "numeric": case["numeric"], "categorical": categorical}


def _load(database: duckdb.DuckDBPyConnection, case: dict[str, Any], decode: dict[str, list[str]]) -> None:
    """Creates the table `rows`: joined, with target and split, without rows that have no target."""
    chosen = [f"main.{_name(column)}" for column in decode[case["table"]]]
    joins = []
    for name, join in case["joins"].items():
        chosen += [f"{name}.{_name(there)} as {_name(here)}" for there, here in join["columns"].items()]
        on = " and ".join(f"main.{_name(key)} = {name}.{_name(key)}" for key in join["on"])
        joins.append(f"left join read_parquet('{join['path']}') {name} on {on}")
    time, target = _name(case["time"]), _name(case["target"])
    database.execute(
        f"create temp table joined as select main.file_row_number as row, {', '.join(chosen)} "
        f"from read_parquet('{case['table']}', file_row_number = true) main {' '.join(joins)} "
        f"where main.{target} is not null"
    )
    (count,) = database.execute("select count(*) from joined").fetchone() or (0,)
    train_end, valid_end = split_ends(count)
    database.execute(
        f"create temp table rows as select *, ({target} > {case['above']})::float as target_, "
        f"(place > {train_end})::tinyint + (place > {valid_end})::tinyint as split "
        f"from (select *, row_number() over (order by {time}, row) as place from joined)"
    )


def _vocabularies(database: duckdb.DuckDBPyConnection, case: dict[str, Any]) -> None:
    for column in case["categorical"]:
        name = _name(column)
        database.execute(
            f"create temp table {_name('vocabulary_' + column)} as "
            f"select {name} as value, (row_number() over (order by n desc, {name}) + 1)::integer as code "
            f"from (select {name}, count(*) as n from rows where split = 0 and {name} is not null "
            f"group by {name} having n >= {case['min_count']})"
        )


def _made(database: duckdb.DuckDBPyConnection, case: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    medians = ", ".join(f"quantile_disc({_name(column)}::float, 0.5)" for column in case["numeric"])
    filled = [
        f"coalesce({_name(column)}::float, {median!r}::float)"
        for column, median in zip(case["numeric"], _row(database, medians), strict=True)
    ]
    moments = _row(
        database, ", ".join(f"avg({value}::double), stddev_pop({value}::double)" for value in filled)
    )
    numbers = [
        f"({value} - {mean!r}::float) / {(deviation or 1.0)!r}::float as {_name(column)}"
        for column, value, mean, deviation in zip(
            case["numeric"], filled, moments[::2], moments[1::2], strict=True
        )
    ]
    tables, codes = [], []
    for column in case["categorical"]:
        vocabulary = _name("vocabulary_" + column)
        tables.append(f"left join {vocabulary} on rows.{_name(column)} = {vocabulary}.value")
        codes.append(
            f"case when rows.{_name(column)} is null then 0 else coalesce({vocabulary}.code, 1) end "
            f"as {_name('code_' + column)}"
        )
    time = case["time"]
    parts = [
        f"(hour({_name(time)}) + 1)::integer as {_name(f'code_{time}_hour')}",
        f"isodow({_name(time)})::integer as {_name(f'code_{time}_weekday')}",
    ]
    chosen = ", ".join(["row", "split", "target_ as target", *numbers, *codes, *parts])
    return dict(database.execute(f"select {chosen} from rows {' '.join(tables)} order by row").fetchnumpy())


def _row(database: duckdb.DuckDBPyConnection, chosen: str) -> tuple[Any, ...]:
    return database.execute(f"select {chosen} from rows where split = 0").fetchone() or ()


def _name(column: str) -> str:
    return f'"{column}"'
