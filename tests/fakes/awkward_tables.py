"""Tables made of what tends to differ between machines: nulls, NaN, infinities, large integers, unicode, zones."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec

WORDS = [
    "zürich",
    "naïve",
    "日本",
    "🐤",
    "a",
    "A",
    "ab",
    "",
    "Ω",
    "e\u0301",
    "é",
    " ",
    "\t",
    "0",
    "nan",
    "null",
]

_STATS = ["mean", "std", "min", "max"]


def write_awkward_tables(folder: Path, rows: int, seed: int = 0) -> PipelineSpec:
    """main in three files (one row; rows without a target; the rest in small row groups) and a table of places."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    parts = [_main(random, 1, 0), _main(random, 300, 1, targets=False), _main(random, rows, 301)]
    for number, part in enumerate(parts):
        pq.write_table(part, folder / f"main-{number}.parquet", row_group_size=max(1, rows // 7))
    places = pa.table(
        {
            "word": pa.array([word for word in WORDS if word]),
            "height": pa.array([None if index % 5 == 0 else index / 3 for index in range(len(WORDS) - 1)]),
            "people": pa.array([2**53 + index for index in range(len(WORDS) - 1)], pa.int64()),
        }
    )
    pq.write_table(places, folder / "places.parquet")
    return _spec(folder)


def _main(random: np.random.Generator, rows: int, first: int, *, targets: bool = True) -> pa.Table:
    numbers = random.normal(size=rows) * 10.0 ** random.integers(-40, 38, rows)
    odd = np.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3.4e38, -3.4e38, 1.0, 2.0**-126])
    floats = np.where(random.random(rows) < 0.3, random.choice(odd, rows), numbers)
    large = random.integers(-(2**62), 2**62, rows) | 1
    codes = random.integers(0, 50, rows) * 7_919_113_517_021  # far apart: no table by value
    day = 86_400_000_000
    times = (first + np.arange(rows)) * 7_777_777 * 1000 + random.integers(-day, day, rows)
    words = random.choice(np.asarray(WORDS, dtype=object), rows)
    late = np.where(np.arange(rows) > 0.9 * rows, "late-", "")  # seen in the test split alone
    names = [f"{prefix}{number}" for prefix, number in zip(late, random.integers(0, 40, rows), strict=True)]
    return pa.table(
        {
            "ordinary": _some_null(random, random.normal(3, 2, rows).astype(np.float32)),
            "second": _some_null(random, random.exponential(2, rows).astype(np.float32)),
            "third": _some_null(random, random.integers(0, 30, rows).astype(np.int8)),
            "extreme": _some_null(random, floats.astype(np.float32)),
            "wide": _some_null(random, numbers * 1e5),  # float64, some beyond float32
            "large": _some_null(random, large),
            "small": _some_null(random, random.integers(-5, 5, rows).astype(np.int16)),
            "yes": _some_null(random, random.random(rows) < 0.4),
            "word": _some_null(random, words.tolist(), pa.string()),
            "name": _some_null(random, names, pa.string()),
            "code": _some_null(random, codes),
            "level": _some_null(random, random.integers(0, 9, rows).astype(np.int32)),
            "when": pa.array(times, pa.timestamp("us", tz="Europe/Berlin")),
            "seen": _some_null(random, times * 1000 + 1, pa.timestamp("ns", tz="America/New_York")),
            "y": _some_null(random, random.random(rows)) if targets else pa.nulls(rows, pa.float64()),
        }
    )


def _some_null(random: np.random.Generator, values: Any, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, kind, mask=random.random(len(values)) < 0.1)


def _spec(folder: Path) -> PipelineSpec:
    return load_spec(_document(folder))


def _document(folder: Path) -> dict[str, Any]:
    numbers = ["ordinary", "extreme", "wide", "large", "small", "yes", "height", "people"]
    return {
        "name": "awkward",
        "data": {
            "tables": {"main": str(folder / "main-*.parquet"), "places": str(folder / "places.parquet")},
            "joins": [{"with": "places", "on": "word", "columns": ["height", "people"], "source": "lookup"}],
            "target": {"expression": "y > 0.5", "task": "binary"},
            "time": "when",
        },
        "features": [
            {
                "columns": numbers,
                "steps": ["fill_median", {"clip": {"q": [0.01, 0.99]}}, "normalize"],
            },
            {
                "columns": ["word", "name", "code"],
                "steps": [{"categorify": {"min_count": 2, "buckets": 3}}],
            },
            {"columns": ["level"], "steps": ["categorify"]},
            {
                "columns": ["second"],
                "steps": [{"fill_median": {"indicator": True}}, "log1p", "min_max"],
            },
            {"columns": ["third"], "steps": ["fill_mode", "robust_scale"]},
            {"columns": ["wide"], "steps": [{"bucketize": {"quantiles": 5}}]},
            {"columns": ["name"], "steps": [{"target_encode": {"smoothing": 5}}, "normalize"]},
            {"columns": ["word"], "steps": ["count_encode", "log1p"]},
            {"columns": ["ordinary"], "steps": [{"group_stats": {"by": "name"}}, "normalize"]},
            {"columns": ["extreme", "large"], "steps": [{"group_stats": {"by": "word", "stats": _STATS}}]},
            {"columns": ["word"], "steps": [{"one_hot": {"max_size": 4}}]},
            {"columns": ["large"], "steps": [{"hash_bucket": 16}]},
            {"columns": ["seen"], "steps": [{"cyclical": ["hour"]}]},
            {"columns": ["when", "seen"], "steps": [{"date_parts": ["hour", "weekday", "day", "month"]}]},
        ],
    }


def write_awkward_variants(folder: Path, rows: int) -> dict[str, PipelineSpec]:
    """What relational work can meet, over the same tables: filters, derived columns, every split, every task."""
    write_awkward_tables(folder, rows)
    prices = pa.table(
        {
            "level": pa.array([None, *range(7)] * 3, pa.int32()),
            "since": pa.array(
                np.repeat([-(10**12), 0, rows * 4_000_000], 8) * 1000, pa.timestamp("us", tz="UTC")
            ),
            "price": pa.array(np.arange(24) / 7),
        }
    )
    pq.write_table(prices, folder / "prices.parquet")
    pq.write_table(prices.slice(1, 7).drop_columns("since"), folder / "levels.parquet")
    kinds = pa.table(
        {
            "third": pa.array(range(25), pa.int8()),
            "yes": [True] * 25,
            "name": [f"n{n % 4}" for n in range(25)],
        }
    )
    pq.write_table(kinds, folder / "kinds.parquet")
    return {name: load_spec(_varied(_document(folder), folder, change)) for name, change in _VARIANTS.items()}


_FEW = {"features": [{"columns": ["ordinary", "small"], "steps": ["fill_median", "normalize"]},
                     {"columns": ["word", "code"], "steps": ["categorify"]}]}  # fmt: skip
_VARIANTS: dict[str, dict[str, Any]] = {
    "derived": {
        "where": "small > -5 or is_null(small) and not word == 'a'",
        "derived": {
            "ratio": "ordinary / second",
            "total": "level + small - 2",
            "rest": "(ordinary % 1.5) + max(small, 0)",
            "apart": "abs(wide - 0.1)",
            "known": "name in ('3', 'late-7') or word == '日本'",
            "early": "seen < '1970-03-01'",
            "same": "name == word",
        },
        "checks": [
            {"column": "ordinary", "min": -100, "max": 100, "max_nulls": 0.9},
            {"column": "level", "values": list(range(9))},
            {"column": "yes", "type": "bool"},
        ],
        "features": [
            {"columns": ["ratio", "total", "rest", "apart"], "steps": ["fill_median", "normalize"]},
            {"columns": ["known", "early", "total"], "steps": ["categorify"]},
        ],
        "split": {"gap": "1d"},
    },
    "joined": {
        "joins": [
            {"with": "kinds", "on": ["third", "yes"], "how": "inner", "columns": {"name": "kind"}},
            {"with": "prices", "on": "level", "as_of": {"column": "seen", "there": "since"}, "columns": ["price"]},
            {"with": "levels", "on": "level", "columns": {"price": "cost"}, "source": "lookup"},
        ],
        "features": [
            {"columns": ["price", "cost", "ordinary"], "steps": ["fill_median", "normalize"]},
            {"columns": ["kind", "name"], "steps": ["categorify"]},
        ],
    },
    "other_names": {
        "rename": {"main": {"third": "kind_code", "yes": "score?", "wide": "width", "seen": "looked",
                            "word": "row_word"},
                   "prices": {"since": "from", "price": "amount"}, "kinds": {"name": "label_of_kind"}},
        "joins": [
            {"with": "kinds", "on": {"kind_code": "third", "score?": "yes"}, "how": "inner",
             "columns": {"label_of_kind": "kind"}},
            {"with": "prices", "on": "level", "as_of": {"column": "looked", "there": "from"}, "columns": ["amount"]},
            {"with": "levels", "on": {"small": "level"}, "columns": {"price": "cost"}, "source": "lookup"},
        ],
        "features": [
            {"columns": ["amount", "cost", "width"], "steps": ["fill_median", "normalize"]},
            {"columns": ["kind", "row_word", "score?"], "steps": ["categorify"]},
        ],
    },
    "known": {
        "target": {"expression": "y > 0.5 or wide > 1e3 or price > 3", "task": "binary",
                   "known_at_serving": ["wide", "price"]},
        "time": None,
        "joins": [
            {"with": "kinds", "on": "third", "columns": {"name": "kind"}},
            {"with": "prices", "on": "level", "as_of": {"column": "seen", "there": "since"}, "columns": ["price"]},
            {"with": "levels", "on": "level", "columns": {"price": "cost"}, "source": "lookup"},
        ],
        "derived": {"triple": "wide * 3", "dear": "price / 7"},
        "features": [
            {"columns": ["wide", "price", "triple", "dear"], "steps": ["fill_median", "normalize"]},
            {"columns": ["kind"], "steps": ["categorify"]},
        ],
    },
    "classes": {"target": {"expression": "level", "task": "multiclass"}, "time": None,
                "split": {"kind": "stratified"},
                "features": [*_FEW["features"], {"columns": ["name"], "steps": ["target_encode"]}]},
    "texts": {"target": {"expression": "word", "task": "multiclass"},
              "features": [{"columns": ["ordinary"], "steps": ["fill_mode"]}]},
    "groups": {"target": {"expression": "y * 3 - 1", "task": "regression"}, "time": None, "id": "code",
               "split": {"kind": "group", "group": "code"},
               "features": [*_FEW["features"], {"columns": ["name", "code"], "steps": ["target_encode"]}]},
    "windows": {
        "windows": [
            {"by": "name", "rows": 3, "make": {"before": "mean(ordinary)", "seen_before": "count()"}},
            {"by": "word", "make": {"extremes": "mean(extreme)", "larges": "mean(large)"}},
        ],
        "features": [
            {"columns": ["before", "seen_before", "extremes", "larges"], "steps": ["fill_median", "normalize"]}
        ],
    },
    "spans": {
        "unique": {"by": ["code", "small"], "keep": "last"},
        "windows": [
            {"by": "word", "span": "2h", "delay": "10m",
             "make": {"sums": "sum(small)", "totals": "sum(ordinary)", "least": "min(extreme)", "most": "max(large)"}},
            {"by": ["name", "level"],
             "make": {"last": "lag(word)", "third_last": "lag(wide, 3)", "known": "count(yes)"}},
        ],
        "features": [
            {"columns": ["sums", "totals", "least", "most", "third_last", "known"],
             "steps": ["fill_median", "normalize"]},
            {"columns": ["last"], "steps": ["categorify"]},
        ],
    },
    "own": {"features": [
        {"columns": ["ordinary"], "steps": ["fill_median", {"tests.fakes.own_operators:AboveMost": {"few": 9}}]},
        {"columns": ["small"], "steps": ["fill_median"]},
    ]},
}  # fmt: skip


def _varied(document: dict[str, Any], folder: Path, change: dict[str, Any]) -> dict[str, Any]:
    data = document["data"] | {key: value for key, value in change.items() if key != "features"}
    data["tables"] = {"main": data["tables"]["main"]}
    if "joins" in change:
        others = {"kinds": "kinds.parquet", "prices": "prices.parquet", "levels": "levels.parquet"}
        data["tables"] |= {name: str(folder / file) for name, file in others.items()}
    else:
        del data["joins"]
    return {"name": "awkward", "data": data, "features": change["features"]}
