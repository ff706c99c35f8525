"""Large joins, windows and renamed columns: the dataset is what it is without them."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serin
from serin.columns.column import Column
from serin.draft.guess import draft_table
from serin.errors import ColumnMissing, DataError, JoinNotManyToOne, SpecError, TableTooLarge
from serin.etl.raw_rows import read_test_rows
from serin.etl.relational.across_pieces.rolling import look_back
from serin.formats.dataset import read_dataset
from serin.formats.schema import INT64_NULL
from serin.pipeline.check import check_spec
from serin.scoring.bulk import find_pieces, score_piece
from serin.spec.data import RESERVED, RESERVED_PREFIXES, is_reserved
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.spec.relation import WindowSpec
from serin.store.store import Store
from tests.logs import heard
from tests.unit.etl.trips import START, build, rates, spec_of, trips
from tests.unit.features.exact_tables import finite, integers, nearest

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


CALLS = {"sum_f": "sum(f)", "mean_f": "mean(f)", "mean_i": "mean(i)", "sum_i": "sum(i)"}
rows = st.tuples(
    st.integers(0, 2),
    st.integers(0, 20),
    st.one_of(finite, finite, st.sampled_from([np.nan, np.inf])),
    st.one_of(integers, st.just(INT64_NULL)),
)


def windows(table: list[Any], calls: dict[str, str], last: int | None = None) -> dict[str, Any]:
    keys, times, f, i = zip(*table, strict=True)
    columns = {
        "key": Column(kind="int", values=np.asarray(keys, np.int64)),
        "f": Column(kind="float", values=np.asarray(f, np.float32)),
        "i": Column(kind="int", values=np.asarray(i, np.int64)),
    }
    made = look_back(WindowSpec(by=("key",), rows=last, make=calls), columns, np.asarray(times, np.int64))
    return {name: column.values for name, column in made.items()}


def past_of(table: list[Any], row: int, place: int, last: int | None) -> list[Fraction]:
    order = sorted(range(len(table)), key=lambda other: (table[other][1], other))
    past = [each for each in order if table[each][0] == table[row][0] and table[each][1] < table[row][1]]
    values = [table[each][place] for each in past[len(past) - last if last and last < len(past) else 0 :]]
    return [Fraction(value) for value in values if value != INT64_NULL and np.isfinite(value)]


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=30), st.sampled_from([None, 1, 3]))
def test_sums_over_windows_are_the_correctly_rounded_exact_ones(table: list[Any], last: int | None) -> None:
    floats = {name: call for name, call in CALLS.items() if name != "sum_i"}
    made = windows(table, floats, last)
    for row in range(len(table)):
        for name in floats:
            values = past_of(table, row, 2 if name.endswith("f") else 3, last)
            if not values:
                assert np.isnan(made[name][row])
                continue
            exact = sum(values) / (len(values) if name.startswith("mean") else 1)
            assert made[name][row] == nearest(exact), (row, name)
    sums = [past_of(table, row, 3, last) for row in range(len(table))]
    if all(abs(sum(values)) < 2**63 for values in sums):
        expected = [int(sum(values)) if values else INT64_NULL for values in sums]
        assert windows(table, {"sum_i": "sum(i)"}, last)["sum_i"].tolist() == expected
    else:
        with pytest.raises(DataError, match="does not fit in 64 bits; use mean"):
            windows(table, {"sum_i": "sum(i)"}, last)


def test_one_outlier_changes_only_the_windows_that_hold_it() -> None:
    draw = np.random.default_rng(3)
    amounts = (draw.integers(1, 10_000, 2_000) / 100).astype(np.float32)
    table = [(row % 7, row, float(amount), row) for row, amount in enumerate(amounts)]
    usual = windows(table, CALLS, 5)
    table[1_500] = (1_500 % 7, 1_500, 1e12, 2**62)
    changed = windows(table, CALLS, 5)
    hit = [row for row in range(2_000) if row % 7 == 1_500 % 7 and 0 < (row - 1_500) // 7 <= 5]
    for name in CALLS:
        apart = np.flatnonzero(
            ~np.equal(usual[name], changed[name]) & ~np.isnan(usual[name].astype(np.float64))
        )
        assert apart.tolist() == hit, name


@pytest.mark.parametrize("values", [[2**62, 2**62], [-(2**62), -(2**62)], [INT64_NULL + 1] * 2])
def test_a_sum_of_integers_beyond_64_bits_is_refused(values: list[int]) -> None:
    table = [(0, row, 0.0, value) for row, value in enumerate([*values, 0])]
    with pytest.raises(DataError, match="window column 'total': a sum of 'i' does not fit in 64 bits"):
        windows(table, {"total": "sum(i)"})
    assert windows(table, {"mean": "mean(i)"})["mean"][-1] == np.float32(values[0])


NAMES = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="`"), min_size=1, max_size=12
)
PREFIXED = [f"{prefix}x" for prefix in RESERVED_PREFIXES]


def spec_named(folder: Path, frame: pd.DataFrame, names: dict[str, str], **data: Any) -> PipelineSpec:
    """The same spec whatever the columns are called: `names` says how."""
    at = {name: names.get(name, name) for name in trips(1).columns}
    return spec_of(
        folder,
        frame=frame,
        target={"expression": f"`{at['tip']}` > 2", "task": "binary"},
        time=at["start"],
        derived={"per_head": f"`{at['fare']}` / `{at['people']}`"},
        where=f"`{at['zone']}` < 3",
        checks=[{"column": at["people"], "min": 0}],
        windows=[{"by": at["taxi"], "make": {"before": f"lag(`{at['fare']}`)"}}],
        features=[
            {
                "columns": [at["fare"], at["people"], "per_head", "before"],
                "steps": ["fill_median", "normalize"],
            },
            {"columns": [at["taxi"]], "steps": ["categorify"]},
        ],
        **data,
    )


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    st.lists(NAMES, min_size=7, max_size=7, unique=True).filter(
        lambda names: not any(is_reserved(name) or name in trips(1) for name in names)
    )
)
def test_names_in_the_spec_and_in_the_file_give_one_dataset(
    tmp_path_factory: pytest.TempPathFactory, new: list[str]
) -> None:
    folder, names = tmp_path_factory.mktemp("renamed"), dict(zip(trips(1).columns, new, strict=True))
    in_file = spec_named(folder, trips().rename(columns=names), names)
    expected = build(in_file, Store(str(folder / "a"))).digest
    in_spec = spec_named(folder, trips(), names, rename={"trips": names})
    assert build(in_spec, Store(str(folder / "b"))).digest == expected
    assert "rename" not in in_file.model_dump()["data"]


def test_folders_texts_and_large_row_groups_are_renamed_too(tmp_path: Path) -> None:
    """A column that folders name, files that are converted first, and row groups that are written again smaller."""
    names = {"zone": "area", "fare": "price", "taxi": "cab"}
    for zone, part in trips(36_000).groupby("zone"):
        (tmp_path / f"zone={zone}").mkdir()
        part.drop(columns="zone").to_csv(tmp_path / f"zone={zone}" / "trips.csv", index=False)
    features = [
        {"columns": ["price"], "steps": ["fill_median", "normalize"]},
        {"columns": ["area", "cab"], "steps": ["categorify"]},
    ]
    place = {"tables": {"trips": str(tmp_path / "zone=*" / "*.csv")}}
    spec = spec_of(tmp_path, features=features, rename={"trips": names}, **place)
    whole = build(spec, Store(str(tmp_path / "whole"))).digest
    small = build(spec, Store(str(tmp_path / "small")), piece_rows=600)
    assert small.digest == whole
    assert [column.name for column in read_dataset(small.path).inputs] == ["price", "area", "cab"]
    rows = read_test_rows(spec.data, spec.features, small, max_rows=50)
    assert rows.table.column_names == ["price", "area", "cab"]


def test_options_of_a_table_name_columns_as_its_files_do(tmp_path: Path) -> None:
    trips().to_csv(tmp_path / "trips.csv", index=False, sep=";")
    table = {"path": str(tmp_path / "trips.csv"), "delimiter": ";", "null_values": {"taxi": ["t3"]}}
    features = [{"columns": ["cab"], "steps": ["categorify"]}]
    spec = spec_of(tmp_path, features=features, tables={"trips": table}, rename={"trips": {"taxi": "cab"}})
    (column,) = read_dataset(build(spec, Store(str(tmp_path / "store"))).path).inputs
    assert (column.name, column.null_texts) == ("cab", ("t3",))


@pytest.mark.parametrize(
    ("rename", "key", "says"),
    [
        ({"fare": "price"}, "data.rename", "write rename: {trips: {fare: price}}"),
        (
            {"trip": {"fare": "price"}},
            "data.rename.trip",
            "no table 'trip' in data.tables; did you mean 'trips'",
        ),
        ({"trips": {"fare": "fare"}}, "data.rename.trips.fare", "is its name already"),
        ({"trips": {"fare": ""}}, "data.rename.trips.fare", "the new name is empty"),
        ({"trips": {"fare": "tip", "tip": "fare"}}, "data.rename.trips.fare", "names are not exchanged"),
        ({"trips": {"fare": "tip", "tip": "fee"}}, "data.rename.trips.fare", "'tip' is renamed itself"),
        ({"trips": {"fare": "a", "tip": "a"}}, "data.rename.trips.tip", "'fare' is renamed to 'a' too"),
        *(
            ({"trips": {"fare": name}}, "data.rename.trips.fare", f"{name!r} is reserved")
            for name in (*RESERVED, *PREFIXED)
        ),
        (
            {"trips": {"fair": "price"}},
            "data.rename.trips.fair",
            "no column 'fair' in 'trips'; did you mean 'fare'",
        ),
        ({"trips": {"fare": "people"}}, "data.rename.trips.fare", "'trips' has a column 'people' already"),
    ],
)
def test_a_name_that_cannot_be_given_is_refused_with_a_way_out(
    tmp_path: Path, rename: Any, key: str, says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        build(spec_of(tmp_path, rename=rename), Store(str(tmp_path / "store")))
    assert any(found == key and says in said for found, said in caught.value.fields["problems"]), str(
        caught.value
    )


def test_the_old_name_is_answered_with_the_new_one(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rename={"trips": {"fare": "price"}})
    with pytest.raises(
        ColumnMissing, match=r"column 'fare' is not in 'trips'; data\.rename calls it 'price'"
    ):
        build(spec, Store(str(tmp_path / "store")))


@pytest.mark.parametrize("name", [*RESERVED, *PREFIXED])
def test_a_reserved_name_is_refused_with_an_advice_that_can_be_followed(tmp_path: Path, name: str) -> None:
    frame = trips().rename(columns={"fare": name})
    features = [{"columns": [name], "steps": ["fill_median", "normalize"]}]
    with pytest.raises(SpecError, match=f"add data.rename: {{trips: {{{name}: input_{name}}}}}"):
        spec_of(tmp_path, frame=frame, features=features)
    followed = [{"columns": [f"input_{name}"], "steps": ["fill_median", "normalize"]}]
    spec = spec_of(tmp_path, frame=frame, features=followed, rename={"trips": {name: f"input_{name}"}})
    assert [column.name for column in check_spec(spec).inputs] == [f"input_{name}"]


@pytest.mark.parametrize("target", ["tip > 2", "score > 2"])
def test_a_draft_renames_reserved_columns_but_not_those_of_the_target(tmp_path: Path, target: str) -> None:
    """All reserved names at once, and names that only look reserved."""
    frame = trips()
    for number, name in enumerate(
        (*RESERVED, *PREFIXED, "prediction", "id", "input_row", "Score", "logits", "num")
    ):
        frame[name] = frame["tip"].sample(frac=1.0, random_state=number).to_numpy()
    frame.to_parquet(tmp_path / "main.parquet")
    (tmp_path / "spec.yaml").write_text(draft_table(tmp_path / "main.parquet", target).text, encoding="utf-8")
    spec = load_spec(tmp_path / "spec.yaml")
    reserved = [name for name in (*RESERVED, *PREFIXED) if name not in target]
    free = {name: f"input_{'input_' if name == 'row' else ''}{name}" for name in reserved}
    assert spec.data.rename == {"main": free}
    asked = [column.name for column in check_spec(spec).inputs]
    assert set(asked) >= {*free.values(), "prediction", "id", "input_row", "Score", "logits", "num"}
    assert [
        column.name for column in read_dataset(build(spec, Store(str(tmp_path / "s"))).path).inputs
    ] == asked


def test_a_table_of_reserved_names_goes_from_a_draft_to_a_version_that_answers(
    tmp_path: Path, home: Path
) -> None:
    frame = trips()[["fare", "people"]].assign(paid=trips()["tip"] + trips()["people"].astype(float))
    for number, name in enumerate((*RESERVED, *PREFIXED, "prediction", "id")):
        frame[name] = frame["fare"].sample(frac=1.0, random_state=number).to_numpy()
    frame.to_parquet(tmp_path / "trips.parquet")
    pipeline = serin.Pipeline.draft(tmp_path / "trips.parquet", target="paid > 4", name="trips")
    pipeline.check()
    pipeline.train()
    model = pipeline.export()
    sent = frame.rename(columns=pipeline.spec.data.rename["main"]).drop(columns="paid")
    scores = model.predict(sent)["score"].tolist()
    (piece,) = find_pieces(tmp_path / "trips.parquet")  # as it is, with the names of the training table
    # ONNX Runtime adds the leaves in another order when it has another number of threads
    assert score_piece(str(model.path), piece)["score"].to_pylist() == pytest.approx(scores, abs=1e-6)
    assert {f"input_{name}" for name in (*RESERVED, *PREFIXED)} <= set(
        model.explain(sent.head(3)).frame.columns
    )
