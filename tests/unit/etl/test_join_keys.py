"""Joins whose keys have different names in the two tables give what keys with one name give."""

from pathlib import Path
from typing import Any

import pytest

from serin.errors import ColumnMissing, JoinNotManyToOne, SpecError
from serin.formats.dataset import read_dataset
from serin.spec.load import load_spec
from serin.spec.relation import JoinSpec
from serin.spec.yaml_file import read_yaml
from serin.store.store import Store
from tests.unit.etl.test_large_joins import FEATURES, narrow, taxis
from tests.unit.etl.trips import build, rates, spec_of

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


def test_a_key_that_the_other_table_lacks_is_named(tmp_path: Path) -> None:
    spec = joined(
        tmp_path, [CARS[0]], {"with": "taxis", "on": {"taxi": "plat"}, "columns": ["maker"]}, renamed=OTHER
    )
    with pytest.raises(ColumnMissing, match=r"joins\[0\]\.on: column 'plat' is not in 'taxis'"):
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
