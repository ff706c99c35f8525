"""Columns that the spec renames: the dataset is that of a file whose columns have the new names."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serin
from serin.draft.guess import guess_spec
from serin.errors import ColumnMissing, SpecError
from serin.etl.raw_rows import read_test_rows
from serin.export.score.bulk import find_pieces, score_piece
from serin.formats.dataset import read_dataset
from serin.pipeline.check import check_spec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.spec.rename import RESERVED, RESERVED_PREFIXES, is_reserved
from serin.store.store import Store
from tests.unit.etl.trips import build, spec_of, trips

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
    (tmp_path / "spec.yaml").write_text(guess_spec(tmp_path / "main.parquet", target), encoding="utf-8")
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
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
