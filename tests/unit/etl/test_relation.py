"""Joins, filters, derived columns, rows taken once and windows: held against pandas and plain loops."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from serin.errors import ColumnMissing, JoinNotManyToOne, SpecError
from serin.etl.binding.layout import lay_out
from serin.etl.engines.engine import ProcessEngine
from serin.etl.relational.groups import AsOfIndex
from serin.etl.relational.prepare import Preparation, prepare_pieces
from serin.etl.sources.files import find_files
from serin.etl.sources.tables import cut, open_table
from serin.formats.dataset import read_dataset
from serin.machine.dask_cluster import local_cluster
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.spec.relation import JoinSpec
from serin.spec.yaml_file import read_yaml
from serin.store.store import Store
from tests.unit.etl.test_large_joins import FEATURES, narrow, taxis
from tests.unit.etl.trips import build, rates, spec_of, trips

WINDOWS = [
    {
        "by": "taxi",
        "make": {"n": "count()", "total": "sum(fare)", "before": "lag(fare)", "second": "lag(zone, 2)"},
    },
    {
        "by": ["taxi", "zone"],
        "rows": 3,
        "make": {"mean3": "mean(tip)", "least3": "min(people)", "most3": "max(fare)"},
    },
    {"by": "zone", "span": "2d", "delay": "1h", "make": {"n2d": "count(fare)", "people2d": "sum(people)"}},
    {"by": "zone", "rows": 1, "make": {"last_taxi": "lag(taxi)"}, "source": "training_only"},
]
MADE = [name for window in WINDOWS for name in window["make"]]  # type: ignore[attr-defined]
NUMBERS = [name for name in MADE if name != "last_taxi"]


def related(spec: PipelineSpec, folder: Path, piece_rows: int = 200) -> dict[str, list[Any]]:
    """The columns after all relational work, with nulls as None, and `rows`."""
    tables = {name: open_table(name, find_files(name, url), folder) for name, url in spec.data.tables.items()}
    layout = lay_out(spec.data, spec.features, tables)
    work = Preparation(data=spec.data, features=spec.features, layout=layout, tables=tables, scratch=folder)
    with ProcessEngine(1) as engine:
        held, _ = prepare_pieces(work, engine, cut(tables[spec.data.main], piece_rows), rows=piece_rows)
        pieces = engine.collect(lambda prepared: prepared, held)
    found: dict[str, list[Any]] = {"rows": [row for piece in pieces for row in piece.rows.tolist()]}
    for name in pieces[0].columns:
        found[name] = [value for piece in pieces for value in piece.columns[name].to_arrow().to_pylist()]
    return found


def features(*columns: str) -> list[dict[str, Any]]:
    return [{"columns": list(columns), "steps": ["fill_median", "normalize"]}]


def naive_window(frame: pd.DataFrame, row: int, window: dict[str, Any]) -> pd.DataFrame | None:
    """The rows of a window in order of (time, id), by brute force; None when the row has no key."""
    keys = [window["by"]] if isinstance(window["by"], str) else window["by"]
    own = frame.loc[row]
    if any(pd.isna(own[key]) for key in keys):
        return None
    moment = own["start"] - pd.Timedelta(window.get("delay", "0h"))
    past = frame[(frame[keys] == own[keys]).all(axis=1) & (frame["start"] < moment)]
    past = past.sort_values("start", kind="stable")
    if "span" in window:
        past = past[past["start"] >= moment - pd.Timedelta(window["span"].upper())]
    return past


def naive(frame: pd.DataFrame, row: int, window: dict[str, Any], call: str) -> Any:
    past = naive_window(frame, row, window)
    if past is None:
        return None
    function, _, rest = call.rstrip(")").partition("(")
    column, _, back = rest.partition(",")
    if function == "lag":
        number = int(back or 1)
        value = past[column].iloc[-number] if len(past) >= number else None
        return None if value is None or pd.isna(value) else value
    past = past.tail(window["rows"]) if "rows" in window else past
    if function == "count":
        return len(past) if not column else int(past[column].notna().sum())
    values = past[column].dropna().astype(float)
    return None if values.empty else getattr(values, function)()


def test_windows_hold_what_brute_force_finds(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, features=features(*NUMBERS), windows=WINDOWS)
    found, frame = related(spec, tmp_path), trips()
    assert len(found["rows"]) == len(frame)
    for row in range(0, len(frame), 29):
        for window in WINDOWS:
            for name, call in window["make"].items():  # type: ignore[attr-defined]
                if name == "last_taxi":
                    continue
                expected = naive(frame, row, window, call)
                value = found[name][row]
                if expected is None:
                    assert value is None, (row, name)
                else:
                    assert value == pytest.approx(float(expected), rel=1e-6), (row, name)


def test_a_window_never_sees_its_own_moment_or_a_later_one(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"taxi": ["a"] * 4, "start": pd.to_datetime(["2024-01-01", "2024-01-02", "2024-01-02", "2024-01-03"]),
         "fare": [1.0, 2.0, 4.0, 8.0], "tip": [1.0, 3.0, 1.0, 3.0]}
    )  # fmt: skip
    window = {"by": "taxi", "make": {"before": "sum(fare)", "n": "count()"}}
    found = related(
        spec_of(tmp_path, frame=frame, features=features("before", "n"), windows=[window]), tmp_path
    )
    assert found["before"] == [None, 1.0, 1.0, 7.0]
    assert found["n"] == [0, 1, 1, 3]


def test_an_as_of_join_finds_the_newest_row_that_is_not_newer(tmp_path: Path) -> None:
    join = {"with": "rates", "on": "zone", "columns": ["rate"]}
    tables = {"trips": str(tmp_path / "trips.parquet"), "rates": str(tmp_path / "rates.parquet")}
    left = trips().reset_index().sort_values("start")
    close: dict[str, Any] = {"tolerance": pd.Timedelta("2h"), "allow_exact_matches": False}
    for more, options in (({}, {}), ({"within": "2h", "strict": True}, close)):
        asked = join | {"as_of": {"column": "start", "there": "since", **more}}
        found = related(spec_of(tmp_path, tables=tables, joins=[asked], features=features("rate")), tmp_path)
        expected = pd.merge_asof(
            left, rates().sort_values("since"), left_on="start", right_on="since", by="zone", **options
        ).sort_values("index")
        assert found["rate"] == [None if np.isnan(rate) else rate for rate in expected["rate"]]


def test_an_as_of_join_without_keys_goes_by_time_alone() -> None:
    index = AsOfIndex(np.asarray([0, 0, -1]), np.asarray([10, 20, 15]))
    times = np.asarray([9, 10, 16, 25])
    assert index.find(np.zeros(4, np.int64), times, strict=False, within=None).tolist() == [-1, 0, 0, 1]


def test_two_partners_at_the_same_moment_are_refused(tmp_path: Path) -> None:
    tables = {"trips": str(tmp_path / "trips.parquet"), "rates": str(tmp_path / "rates.parquet")}
    join = {"with": "rates", "as_of": {"column": "start", "there": "since"}, "columns": ["rate"]}
    spec = spec_of(tmp_path, tables=tables, joins=[join], features=features("rate"))
    with pytest.raises(JoinNotManyToOne, match=r"key \(since=2024-01-\d\d .*\) occurs 3 times in 'rates'"):
        related(spec, tmp_path)


@pytest.mark.parametrize("keep", ["first", "last"])
def test_rows_are_taken_once_by_time(tmp_path: Path, keep: str) -> None:
    found = related(spec_of(tmp_path, unique={"by": "trip", "keep": keep}), tmp_path)
    ordered = trips().reset_index().sort_values(["start", "index"])
    assert found["rows"] == sorted(ordered.drop_duplicates("trip", keep=keep)["index"].tolist())  # type: ignore[call-overload]


def test_a_filter_keeps_the_rows_for_which_it_is_true(tmp_path: Path) -> None:
    where = "taxi in ('t1', 'ü4') and people > 2 and start >= '2024-01-10'"
    frame = trips()
    truth = (
        frame["taxi"].isin(["t1", "ü4"])
        & (frame["people"] > 2).fillna(False)
        & (frame["start"] >= "2024-01-10")
    )
    found = related(spec_of(tmp_path, where=where), tmp_path)
    assert found["rows"] == frame.index[truth.astype(bool)].tolist()
    assert found["fare"] == [None if np.isnan(fare) else fare for fare in frame["fare"][truth.astype(bool)]]


EVERYTHING: dict[str, Any] = {
    "joins": [
        {"with": "rates", "on": "zone", "as_of": {"column": "start", "there": "since"}, "columns": ["rate"]}
    ],
    "derived": {
        "per_head": "fare / people",
        "dear": "per_head > 5 or taxi == 't1'",
        "above": "fare - total / max(n, 1)",
        "answer": "tip",
    },
    "where": "fare > 1 or is_null(fare)",
    "unique": {"by": "trip", "keep": "last"},
    "windows": WINDOWS[:2],
    "target": {"expression": "answer > 2", "task": "binary"},
    "split": {"gap": "1d"},
    "id": "trip",
}


def everything(folder: Path) -> PipelineSpec:
    tables = {"trips": str(folder / "trips.parquet"), "rates": str(folder / "rates.parquet")}
    chosen = [
        *features("fare", "rate", "per_head", "above", "n", "mean3", "most3"),
        {"columns": ["dear", "taxi"], "steps": ["categorify"]},
    ]
    return spec_of(folder, features=chosen, tables=tables, **EVERYTHING)


def test_all_of_it_gives_one_digest_from_any_engine_and_cut(tmp_path: Path) -> None:
    spec = everything(tmp_path)
    first = build(spec, Store(str(tmp_path / "0")))
    cuts = {
        build(spec, Store(str(tmp_path / f"c{rows}")), piece_rows=rows).digest for rows in (1, 300, 10**9)
    }
    assert cuts == {first.digest}
    with local_cluster(2, closed=False) as client:
        etl = EtlSpec(engine=client.scheduler.address)
        assert build(spec, Store(str(tmp_path / "dask")), etl=etl, piece_rows=300).digest == first.digest


def test_keys_may_be_looked_at_in_parts_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path, features=features(*NUMBERS), windows=WINDOWS, unique={"by": ["trip", "taxi"]})
    expected = related(spec, tmp_path)
    monkeypatch.setattr("serin.etl.relational.across_pieces.global_pass.ROW_BYTES", 200)
    monkeypatch.setattr(
        "serin.etl.relational.across_pieces.global_pass.available_bytes", lambda: 4 * 200 * 150
    )  # six parts
    assert related(spec, tmp_path) == expected


def test_a_derived_feature_asks_clients_for_what_it_is_made_of(tmp_path: Path) -> None:
    described = read_dataset(build(everything(tmp_path), Store(str(tmp_path / "store"))).path)
    names = {column.name for column in described.inputs}
    assert names == {"fare", "rate", "people", "total", "n", "mean3", "most3", "taxi"}
    assert [each.name for each in described.derived] == ["per_head", "dear", "above"]
    assert described.dropped["duplicate"] > 0
    assert described.dropped["gap"] > 0
    assert described.dropped["filtered"] > 0


def test_pieces_without_rows_and_columns_without_values_do_no_harm(tmp_path: Path) -> None:
    frame = trips().assign(fare=np.float32("nan"), taxi=pd.array([None] * 900, dtype="string"))
    windows = [
        {
            "by": "zone",
            "span": "1d",
            "make": {"a": "sum(fare)", "b": "max(fare)", "c": "lag(taxi)", "d": "count(fare)"},
        }
    ]
    late = {"where": "trip >= 800", "unique": {"by": ["taxi", "trip"]}, "windows": windows}
    chosen = [
        {"columns": ["a", "b", "d"], "steps": ["fill_missing"]},
        {"columns": ["c"], "steps": ["categorify"]},
    ]
    found = related(spec_of(tmp_path, frame=frame, features=chosen, **late), tmp_path, piece_rows=1)
    assert len(found["rows"]) == 50
    assert set(found["a"]) == set(found["b"]) == set(found["c"]) == {None}
    assert set(found["d"]) == {0}


def test_rows_with_the_same_key_may_lie_in_any_order(tmp_path: Path) -> None:
    shuffled = trips().sample(frac=1.0, random_state=2).reset_index(drop=True)
    one = spec_of(tmp_path, features=features("total", "n"), windows=WINDOWS[:1])
    before = related(one, tmp_path)
    after = related(
        spec_of(tmp_path, frame=shuffled, features=features("total", "n"), windows=WINDOWS[:1]), tmp_path
    )
    key = [(row.trip, row.fare) for row in shuffled.itertuples()]
    expected = {
        (row.trip, row.fare): (total, n)
        for row, total, n in zip(trips().itertuples(), before["total"], before["n"], strict=True)
        if row.fare == row.fare
    }
    for pair, total, n in zip(key, after["total"], after["n"], strict=True):
        if pair[1] == pair[1]:
            assert (total, n) == expected[pair]  # to the bit: sums do not depend on the order of rows


AS_OF = {"column": "start", "there": "since", "within": "2h"}
CARS = [
    {"columns": ["maker"], "steps": ["categorify"]},
    {"columns": ["load"], "steps": ["fill_median", "normalize"]},
]


def joined(folder: Path, features: Any, *joins: dict[str, Any], renamed: dict[str, str]) -> Any:
    """A spec over taxis and rates, whose columns are called as `renamed` says."""
    folder.mkdir(exist_ok=True)
    taxis().rename(columns=renamed).to_parquet(folder / "taxis.parquet", row_group_size=200)
    tables = {name: str(folder / f"{name}.parquet") for name in ("trips", "rates", "taxis")}
    used = {
        name: path for name, path in tables.items() if name in ("trips", *(join["with"] for join in joins))
    }
    spec = spec_of(folder, features=features, tables=used, joins=list(joins))
    rates().rename(columns=renamed).to_parquet(folder / "rates.parquet")
    return spec


OTHER = {"taxi": "t_name", "zone": "area"}
LARGE = [
    {"with": "taxis", "source": "request", "columns": ["maker", "model", "old", "load", "built"]},
    {"with": "rates", "as_of": AS_OF, "columns": ["rate"], "source": "request"},
]
KEYS: list[tuple[Any, Any]] = [
    (["taxi", "zone"], {"taxi": "t_name", "zone": "area"}),
    ("zone", {"zone": "area"}),
]


@pytest.mark.parametrize("in_parts", [False, True])
def test_two_keys_and_a_time_find_the_same_rows_under_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    same, other = ([join | {"on": keys[at]} for join, keys in zip(LARGE, KEYS, strict=True)] for at in (0, 1))
    expected = build(joined(tmp_path / "same", FEATURES, *same, renamed={}), Store(str(tmp_path / "a")))
    spec = joined(tmp_path / "other", FEATURES, *other, renamed=OTHER)
    if in_parts:
        narrow(monkeypatch)
    assert build(spec, Store(str(tmp_path / "b")), piece_rows=200).digest == expected.digest


@pytest.mark.parametrize("source", ["request", "lookup", "training_only"])
def test_every_source_takes_a_key_with_another_name(tmp_path: Path, source: str) -> None:
    cars = taxis().drop_duplicates("taxi").drop(columns="zone").dropna(subset="taxi")
    features = CARS if source != "training_only" else None
    datasets = []
    for name, key in (("same", "taxi"), ("other", {"taxi": "plate"})):
        join = {"with": "taxis", "on": key, "columns": ["maker", "load"], "source": source}
        spec = joined(tmp_path / name, features, join, renamed={})
        renamed = {"taxi": "plate"} if name == "other" else {}
        cars.rename(columns=renamed).to_parquet(tmp_path / name / "taxis.parquet")
        datasets.append(build(spec, Store(str(tmp_path / name / "store"))))
    assert datasets[0].digest == datasets[1].digest
    described = read_dataset(datasets[1].path)
    asked = {"request": ["maker", "load"], "lookup": ["taxi"], "training_only": ["fare"]}[source]
    assert [column.name for column in described.inputs] == asked
    assert [lookup.key for lookup in described.lookups] == (["taxi"] if source == "lookup" else [])


def test_a_key_that_occurs_twice_is_named_as_its_table_names_it(tmp_path: Path) -> None:
    join = {"with": "taxis", "on": {"taxi": "plate"}, "columns": ["maker"]}
    spec = joined(tmp_path, [CARS[0]], join, renamed={"taxi": "plate"})
    with pytest.raises(JoinNotManyToOne, match=r"on \['plate'\]: key \(plate='t1'\) occurs 3 times"):
        build(spec, Store(str(tmp_path / "store")))


def test_keys_that_the_other_table_calls_otherwise_are_shown_as_a_mapping(tmp_path: Path) -> None:
    join = {"with": "taxis", "on": ["taxi", "zone"], "columns": ["maker"]}
    spec = joined(tmp_path, [CARS[0]], join, renamed={"taxi": "taxi_name"})
    with pytest.raises(
        ColumnMissing, match=r"'taxis'; where the tables .* write on: \{taxi: taxi_name, zone: zone\}"
    ):
        build(spec, Store(str(tmp_path / "store")))


@pytest.mark.parametrize(
    ("on", "says"),
    [
        ("[l_orderkey, {l_line: o_line}]", r"write on: \{l_orderkey: l_orderkey, l_line: o_line\}"),
        ("[{l_orderkey: o_orderkey}]", r"write on: \{l_orderkey: o_orderkey\}"),
        (
            "{l_orderkey: [a, b]}",
            r"neither a list of names nor a mapping of names to names; write on: \[key\]",
        ),
        ("7", "neither a list of names nor a mapping"),
        ("[k, k]", "names a key twice"),
        ("{a: k, b: k}", "names a key twice"),
    ],
)
def test_a_wrong_form_is_answered_with_the_right_one(on: str, says: str) -> None:
    spec = f"""
name: orders
data:
  tables: {{items: i.csv, orders: o.csv}}
  joins: [{{with: orders, on: {on}, columns: [c]}}]
  target: {{expression: y, task: binary}}
features: [{{columns: [c], steps: [normalize]}}]
"""
    with pytest.raises(SpecError, match=says) as caught:
        load_spec(read_yaml(spec))
    assert [key for key, _ in caught.value.fields["problems"]] == ["data.joins[0].on"]


def test_equal_names_in_a_mapping_are_the_list_that_they_mean() -> None:
    forms = [JoinSpec(table="r", on=on, columns=["c"]) for on in ("k", ["k"], {"k": "k"})]  # type: ignore[arg-type]
    assert len({form.model_dump_json() for form in forms}) == 1
    mapped = JoinSpec(table="r", on={"a": "b", "k": "k"}, columns=["c"])  # type: ignore[arg-type]
    assert (mapped.here, mapped.there) == (("a", "k"), ("b", "k"))
    assert JoinSpec.model_validate_json(mapped.model_dump_json(by_alias=True)) == mapped
