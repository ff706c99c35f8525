"""Tables to be joined that do not fit into memory: cut by key, and the dataset is what it is without a cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from serin.errors import JoinNotManyToOne, TableTooLarge
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store
from tests.logs import heard
from tests.unit.etl.trips import START, build, rates, spec_of, trips

FEATURES = [
    {"columns": ["fare", "rate", "load"], "steps": ["fill_median", "normalize"]},
    {"columns": ["taxi", "maker", "old", "model"], "steps": ["categorify"]},
    {"columns": ["built"], "steps": ["date_parts"]},
]


def taxis() -> pd.DataFrame:
    """One row per taxi and zone, with texts, a time, a truth and numbers, all with nulls."""
    names = ["t1", "t2", "ü4", *(f"x{number}" for number in range(400))]
    table = pd.MultiIndex.from_product([names, range(3)], names=["taxi", "zone"]).to_frame(index=False)
    draw = np.random.default_rng(3)
    table["maker"] = draw.choice(["Ford", "Škoda", "", None], len(table))
    table["model"] = [None if row % 5 == 0 else 2**53 + row % 11 for row in range(len(table))]
    table["model"] = table["model"].astype("Int64")
    table["old"] = pd.array(draw.choice([True, False, None], len(table)), dtype="boolean")
    table["load"] = np.where(draw.random(len(table)) < 0.1, np.nan, draw.normal(size=len(table)))
    table["built"] = START - pd.to_timedelta(draw.integers(0, 9000, len(table)), unit="D")
    return pd.concat([table, table.iloc[:1].assign(taxi=None)])


def spec_with(folder: Path, how: str = "left", **changes: Any) -> PipelineSpec:
    taxis().to_parquet(folder / "taxis.parquet", row_group_size=200)
    tables = {name: str(folder / f"{name}.parquet") for name in ("trips", "rates", "taxis")}
    as_of = {"column": "start", "there": "since", "within": "2h"}
    joins = [
        {"with": "taxis", "on": ["taxi", "zone"], "how": how, "source": "request",
         "columns": ["maker", "model", "old", "load", "built"]},
        {"with": "rates", "on": "zone", "as_of": as_of, "columns": ["rate"], "source": "request"},
    ]  # fmt: skip
    return spec_of(folder, features=FEATURES, tables=tables, **({"joins": joins} | changes))


def narrow(monkeypatch: pytest.MonkeyPatch, budget_bytes: int = 12_000) -> None:
    """Leaves room for a part of a table only."""
    monkeypatch.setattr("serin.etl.relational.prepare.shared_budget", lambda _: budget_bytes)


@pytest.mark.parametrize("how", ["left", "inner"])
def test_tables_joined_in_parts_give_the_same_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    spec = spec_with(tmp_path, how, where="fare > 0.5 or is_null(fare)", unique={"by": ["trip", "zone"]})
    expected = build(spec, Store(str(tmp_path / "whole")))
    narrow(monkeypatch)
    for piece_rows in (200, 2000) if how == "left" else (97,):
        said: list[str] = []
        with heard(said.append):
            made = build(spec, Store(str(tmp_path / f"cut-{piece_rows}")), piece_rows=piece_rows)
        assert made.digest == expected.digest
        cut = [line.split(" is joined in ")[0] for line in said if " is joined in " in line]
        assert cut == ["taxis", "rates"]


def test_a_key_that_stands_twice_is_found_in_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow(monkeypatch)
    spec = spec_with(tmp_path)
    twice = pd.concat([taxis(), taxis().iloc[500:501]])
    twice.to_parquet(tmp_path / "taxis.parquet", row_group_size=200)
    with pytest.raises(JoinNotManyToOne, match="taxi='x163'"):
        build(spec, Store(str(tmp_path / "store")))


@pytest.mark.parametrize(
    ("join", "says"),
    [
        ({"with": "taxis", "on": "name", "columns": ["load"], "source": "lookup"}, "a lookup travels inside the model"),
        ({"with": "rates", "as_of": {"column": "start", "there": "since"}, "columns": ["rate"], "source": "request"},
         "a join by time alone cannot be partitioned: give the join a key"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join: Any, says: str
) -> None:
    narrow(monkeypatch, 3_000)
    frame = trips().assign(name=trips()["taxi"])
    features = [{"columns": ["fare", *join["columns"]], "steps": ["fill_median", "normalize"]}]
    tables = {name: str(tmp_path / f"{name}.parquet") for name in ("trips", join["with"])}
    spec = spec_of(tmp_path, frame=frame, features=features, tables=tables, joins=[join])
    taxis().drop_duplicates("taxi").rename(columns={"taxi": "name"}).to_parquet(tmp_path / "taxis.parquet")
    rates().drop_duplicates("since").to_parquet(tmp_path / "rates.parquet")
    with pytest.raises(TableTooLarge, match=says):
        build(spec, Store(str(tmp_path / "store")))
