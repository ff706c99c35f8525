"""Columns that the target reads and that clients know: features like others, and still watched."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from serin.errors import LeakFound, SpecError
from serin.formats.dataset import read_dataset
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store
from tests.unit.etl.trips import START, build, spec_of, whole

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
