"""What a column tells of the target: leaks end the build by name; what clients know may be read."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.columns.column import Column, column_from_arrow
from serin.errors import LeakFound, SpecError
from serin.etl.dataset.leaks import FEWEST, score_by_nulls, score_by_values
from serin.etl.relational.groups import sampled
from serin.formats.dataset import read_dataset
from serin.metrics import auc
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store
from tests.unit.etl.trips import START, build, spec_of, trips, whole


def frame(**columns: Any) -> pd.DataFrame:
    return trips().assign(**columns)


def built(folder: Path, table: pd.DataFrame, *columns: str, codes: bool = False, **data: Any) -> None:
    steps = ["categorify"] if codes else ["fill_median", "normalize"]
    spec = spec_of(folder, frame=table, features=[{"columns": [*columns], "steps": steps}], **data)
    build(spec, Store(str(folder / "store")))


TIP = trips()["tip"].to_numpy()
NOISE = np.random.default_rng(9).normal(size=len(TIP)) * 0.001


def test_a_table_without_leaks_passes(tmp_path: Path) -> None:
    built(tmp_path, trips(), "fare", "people")


@pytest.mark.parametrize(
    ("column", "values", "codes", "says"),
    [
        ("copy", TIP + NOISE, False, "alone predicts the target almost without error"),
        ("against", -TIP, False, "alone predicts the target almost without error"),
        ("word", np.where(TIP > 2, "good", "bad"), True, "alone predicts the target almost without error"),
        ("thanks", np.where(TIP > 2, 1.0, np.nan), False, "has nulls that predict the target"),
    ],
)
def test_a_column_that_tells_the_target_is_named_and_may_pass_by_name(
    tmp_path: Path, column: str, values: Any, codes: bool, says: str
) -> None:
    table = frame(**{column: values})
    with pytest.raises(LeakFound, match=rf"'{column}' {says}[\s\S]*allow_leaks: \[{column}\]") as caught:
        built(tmp_path, table, column, codes=codes)
    assert caught.value.columns == [column]
    assert not Store(str(tmp_path / "store")).datasets()
    built(tmp_path, table, column, codes=codes, allow_leaks=[column])


def test_without_a_time_nothing_is_armed(tmp_path: Path) -> None:
    built(tmp_path, frame(copy=TIP), "copy", time=None)


def test_a_different_id_in_every_row_predicts_nothing(tmp_path: Path) -> None:
    names = [f"trip {row}" for row in range(len(TIP))]
    built(tmp_path, frame(name=names), "name", codes=True)


def test_a_column_that_is_missing_with_the_target_is_named(tmp_path: Path) -> None:
    gone = np.arange(len(TIP)) % 9 == 0
    table = frame(tip=np.where(gone, np.nan, TIP), paid=np.where(gone, np.nan, 1.0 + NOISE))
    with pytest.raises(LeakFound, match=r"'paid' is missing in 100 of the 100 rows whose target is missing"):
        built(tmp_path, table, "paid")


def test_a_regression_and_a_multiclass_target_are_watched_too(tmp_path: Path) -> None:
    with pytest.raises(LeakFound, match="'copy' alone predicts"):
        built(tmp_path, frame(copy=TIP + NOISE), "copy", target={"expression": "tip", "task": "regression"})
    table = frame(
        kind=np.digitize(TIP, [1, 2, 4]), word=np.asarray(list("abcd"))[np.digitize(TIP, [1, 2, 4])]
    )
    with pytest.raises(LeakFound, match="'word' alone predicts"):
        built(tmp_path, table, "word", codes=True, target={"expression": "kind", "task": "multiclass"})


def test_one_thing_in_two_splits_is_named_with_its_rows(tmp_path: Path) -> None:
    says = r"'trip' names the same thing in two splits \d+ times: \d+ is in train \(row \d+\) and in"
    with pytest.raises(LeakFound, match=says):
        built(tmp_path, trips(), "fare", id="trip")
    built(tmp_path, trips(), "fare", id="trip", split={"kind": "group", "group": "trip"})
    built(tmp_path, trips(), "fare", id="trip", allow_leaks=["trip"])


ROWS = 1200
LATE = "received > promised"


def orders() -> pd.DataFrame:
    draw = np.random.default_rng(8)
    promised = START + pd.to_timedelta(draw.integers(0, 9000, ROWS), unit="h")
    limit = np.where(draw.random(ROWS) < 0.2, 0.1, draw.normal(0.1, 1.0, ROWS))  # 0.1 is larger in float32
    return pd.DataFrame(
        {
            "promised": promised.where(draw.random(ROWS) > 0.05),
            "received": promised + pd.to_timedelta(draw.normal(0, 40, ROWS), unit="h"),
            "size": draw.normal(size=ROWS),
            "limit": limit,
            "copy": limit,
            "spent": draw.normal(size=ROWS),
        }
    )


def spec_with(
    folder: Path, *columns: str, known: Any = (), expression: str = LATE, **data: Any
) -> PipelineSpec:
    times = [name for name in columns if name == "promised"]
    numbers = [name for name in columns if name not in times]
    steps = {"times": ["date_parts"], "numbers": ["fill_median", "normalize"]}
    features = [{"columns": names, "steps": steps[kind]}
                for kind, names in (("times", times), ("numbers", numbers)) if names]  # fmt: skip
    target = {"expression": expression, "task": "binary", **({"known_at_serving": known} if known else {})}
    data = {"time": None} | data
    return spec_of(folder, frame=orders(), features=features, target=target, **data)


def test_a_column_that_clients_know_is_a_feature_although_the_target_reads_it(tmp_path: Path) -> None:
    spec = spec_with(
        tmp_path, "promised", "size", "days", known="promised", derived={"days": "promised / 86400000000"}
    )
    assert spec.data.source_of("promised") == "request"
    assert spec.data.source_of("received") == "training_only"
    made = build(spec, Store(str(tmp_path / "store")))
    assert {column.name for column in read_dataset(made.path).inputs} == {"promised", "size"}
    frame = orders()
    known = frame["promised"].notna()
    _, target, rows = whole(made.path)
    assert np.array_equal(rows, np.flatnonzero(known))
    assert np.array_equal(target == 1, (frame["received"] > frame["promised"])[known])


def test_the_target_reads_stored_floats_and_features_read_sent_ones(tmp_path: Path) -> None:
    spec = spec_with(
        tmp_path, "limit", "copy", "tripled", "tripled_copy", known=["limit"], expression="over or spent > 1.5",
        derived={"over": "limit > 0.1", "tripled": "limit * 3", "tripled_copy": "copy * 3"},
    )  # fmt: skip
    num, target, _ = whole(build(spec, Store(str(tmp_path / "store"))).path)
    frame = orders()
    assert np.array_equal(target == 1, (frame["limit"] > 0.1) | (frame["spent"] > 1.5))
    for one, other in ((0, 1), (2, 3)):
        assert np.array_equal(num[:, one].view(np.int32), num[:, other].view(np.int32))


def test_windows_over_columns_of_the_target_are_as_clients_send_them(tmp_path: Path) -> None:
    """Also where the target alone reads the column, and through a derived one."""
    windows = [{"by": "spent", "make": {"last": "lag(limit)"}}]
    spec = spec_with(
        tmp_path, "last", "tripled", expression="limit > 0.5", time="received", windows=windows,
        derived={"tripled": "last * 3"},
    )  # fmt: skip
    frame = orders()
    frame["spent"] = frame["spent"].round().astype(int)
    frame.to_parquet(tmp_path / "trips.parquet")
    assert build(spec, Store(str(tmp_path / "store"))).digest


def test_a_known_column_that_tells_the_target_is_refused_also_without_a_time(tmp_path: Path) -> None:
    frame_says = "spent > 9 or limit > 0.5"  # spent never is: limit alone decides
    spec = spec_with(tmp_path, "limit", "size", known=["limit"], expression=frame_says)
    with pytest.raises(
        LeakFound, match=r"'limit' alone predicts the target almost without error \(1\.000 of 1\)"
    ):
        build(spec, Store(str(tmp_path / "store")))
    derived = spec_with(
        tmp_path, "half", known=["limit"], expression=frame_says, derived={"half": "limit / 2"}
    )
    with pytest.raises(LeakFound) as caught:
        build(derived, Store(str(tmp_path / "store")))
    assert caught.value.columns == ["half", "limit"]
    build(spec_with(tmp_path, "limit", known=["limit"], expression=frame_says, allow_leaks=["limit"]),
          Store(str(tmp_path / "store")))  # fmt: skip


def test_its_nulls_are_not_a_leak_since_they_are_the_target_s(tmp_path: Path) -> None:
    built = build(
        spec_with(tmp_path, "promised", known=["promised"], time="received"), Store(str(tmp_path / "s"))
    )
    assert read_dataset(built.path).dropped["null_target"] > 20


def test_saying_what_is_known_leaves_other_specs_as_they_are(tmp_path: Path) -> None:
    plain = spec_with(tmp_path, "size")
    assert "known_at_serving" not in plain.data.target.model_dump()
    said = spec_with(tmp_path, "size", known=["promised"])
    stores = [Store(str(tmp_path / name)) for name in "ab"]
    assert build(plain, stores[0]).digest == build(said, stores[1]).digest


@pytest.mark.parametrize(
    ("columns", "changes", "key", "says"),
    [
        (["promised"], {}, "features[0].columns", "add data.target.known_at_serving: [promised]"),
        (["limit"], {"expression": "limit"}, "features[0].columns", "is refused: leave it out"),
        (["days"], {"derived": {"days": "promised - 1"}}, "features[0].columns",
         "'days' is derived from 'promised', and 'promised' makes the target"),
        (["over"], {"derived": {"over": "limit > 1"}, "expression": "over or spent > 1"}, "features[0].columns",
         "or derive another column from what clients know"),
        (["size"], {"training_only": ["size"]}, "features[0].columns", "data.training_only names it"),
        (["size"], {"known": ["size"]}, "data.target.known_at_serving", "the target does not read 'size'"),
        (["size"], {"known": ["promised", "received"]}, "data.target.known_at_serving",
         "clients who know all that 'received > promised' reads know the answer"),
        (["size"], {"known": ["promised"], "training_only": ["promised"]}, "data.target.known_at_serving",
         "data.training_only names it; take it out there"),
        (["size"], {"known": ["over"], "derived": {"over": "limit > 1"}, "expression": "over or spent > 1"},
         "data.target.known_at_serving", "'over' is derived; name those of the columns it is made of"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named_with_what_can_be_done(
    tmp_path: Path, columns: list[str], changes: dict[str, Any], key: str, says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        spec_with(tmp_path, *columns, **changes)
    assert any(found == key and says in said for found, said in caught.value.fields["problems"]), str(
        caught.value
    )


RANDOM = np.random.default_rng(4)
TARGET = (RANDOM.random(400) < 0.3).astype(np.float64)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([-np.float32(2.5), -0.0, 0.0, 1e-30, 3.0, 7e20]), min_size=5, max_size=20),
    st.integers(0, 50),
)
def test_numbers_tell_by_their_order_as_the_metric_says(values: list[float], seed: int) -> None:
    column = np.resize(np.asarray(values, np.float32), 300)
    target = (np.random.default_rng(seed).random(300) < 0.4).astype(np.float64)
    told = score_by_values(Column(kind="float", values=column), target, "binary")
    if np.ptp(column) == 0:
        assert told == 0
    else:
        area = auc(target, column)
        assert told == max(area, 1 - area)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_nulls_tell_by_their_order_as_the_metric_says(share: float) -> None:
    null = np.where(TARGET == 1, RANDOM.random(400) < share, RANDOM.random(400) < 0.02)
    area = auc(TARGET, null.astype(np.float32))
    assert score_by_nulls(null, TARGET, "binary") >= max(area, 1 - area)
    assert score_by_nulls(TARGET == 1, TARGET, "binary") == score_by_nulls(TARGET == 0, TARGET, "binary") == 1


@pytest.mark.parametrize("spread", [1, 10**15])
def test_whole_numbers_tell_by_order_and_by_value(spread: int) -> None:
    turned = (
        np.where(TARGET == 1, 5, RANDOM.integers(0, 2, 400) * 10) * spread
    )  # between the others: no order
    column = Column(kind="int", values=turned)
    assert score_by_values(column, TARGET, "binary") == 1
    noise = Column(kind="int", values=RANDOM.integers(0, 4, 400) * spread)
    assert score_by_values(noise, TARGET, "binary") < 0.7


@pytest.mark.parametrize("task", ["binary", "regression", "multiclass"])
def test_words_that_name_the_target_are_found_for_every_task(task: str) -> None:
    target = RANDOM.integers(0, 2 if task == "binary" else 4, 600).astype(np.float64)
    names = column_from_arrow(pa.array([f"word {each}" for each in target]), "string")
    assert score_by_values(names, target, task) > 0.99
    shuffled = column_from_arrow(pa.array([f"word {each}" for each in RANDOM.permutation(target)]), "string")
    assert score_by_values(shuffled, target, task) < 0.7


def test_nulls_tell_and_few_rows_do_not() -> None:
    assert score_by_nulls(RANDOM.random(400) < 0.5, TARGET, "binary") < 0.7
    few = FEWEST - 1
    values = Column(kind="float", values=TARGET[:few].astype(np.float32))
    assert score_by_values(values, TARGET[:few], "binary") == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9), st.floats(0.001, 1.5), st.integers(1, 5), st.booleans())
def test_a_sample_follows_from_row_ids_alone(first: int, share: float, pieces: int, gaps: bool) -> None:
    rows = np.arange(first, first + 4000)
    if gaps:
        rows = rows[RANDOM.random(4000) < 0.5]
    whole = rows[sampled(rows, share)]
    parts = [part[sampled(part, share)] for part in np.array_split(rows, pieces)]
    assert np.array_equal(np.concatenate(parts), whole)
    expected = min(1.0, share) * len(rows)
    assert 0.4 * expected - 20 <= len(whole) <= 2 * expected + 20
