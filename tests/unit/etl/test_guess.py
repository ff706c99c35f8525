from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.draft.guess import draft_table
from serin.errors import SourceMissing, TargetUnusable
from serin.etl.build import build_dataset
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store

ROWS = 400
RNG = np.random.default_rng(3)
CUSTOMERS = pa.table(
    {
        "customer id": range(ROWS),
        "Plan": RNG.choice(["basic", "pro", "on"], ROWS),
        "note": [f"note {row} of its own" for row in range(ROWS)],
        "since": [f"2023-{1 + row % 12:02d}-15" for row in range(ROWS)],
        "monthly": RNG.gamma(2, 20, ROWS),
        "country": ["NL"] * ROWS,
        "calls": RNG.integers(0, 5, ROWS),
        "churn": RNG.choice(["yes", "no"], ROWS),
    }
)


def guessed(folder: Path, table: pa.Table, target: str | None) -> tuple[str, PipelineSpec]:
    """The text, and the spec that is read back from it."""
    pq.write_table(table, folder / "Customers 2024.parquet")
    text = draft_table(folder / "Customers 2024.parquet", target, path_in_spec="Customers 2024.parquet").text
    (folder / "spec.yaml").write_text(text, encoding="utf-8")
    return text, load_spec(folder / "spec.yaml")


def test_a_guessed_spec_loads_builds_and_explains_itself(tmp_path: Path, store: Store) -> None:
    text, spec = guessed(tmp_path, CUSTOMERS, None)
    assert spec.name == "customers-2024"
    assert spec.data.target.expression == "churn == 'yes'"
    assert spec.data.time == "since"
    used = {column for feature in spec.features for column in feature.columns}
    assert used == {"Plan", "since", "monthly", "calls"}
    assert "#   note: every row has its own text (400 different): an id" in text
    assert "#   country: holds one value only" in text
    assert "#   customer id: counts the rows" in text
    assert sum(build_dataset(spec.data, spec.features, spec.etl, store=store).rows.values()) == ROWS


@pytest.mark.parametrize(
    ("target", "expression", "task"),
    [
        ("monthly", "monthly", "regression"),
        ("Plan", "Plan", "multiclass"),
        ("calls", "calls", "multiclass"),
        ("monthly > 40", "monthly > 40", "binary"),
        ("monthly * 2", "monthly * 2", "regression"),
    ],
)
def test_the_task_follows_from_what_the_target_holds(
    tmp_path: Path, target: str, expression: str, task: str
) -> None:
    _, spec = guessed(tmp_path, CUSTOMERS, target)
    assert (spec.data.target.expression, spec.data.target.task) == (expression, task)


ADULTS = np.datetime64("1950-01-01", "us") + RNG.integers(0, 50 * 365, ROWS) * np.timedelta64(
    86_400_000_000, "us"
)
LOGGED = np.datetime64("2024-01-01", "us") + np.arange(ROWS) * np.timedelta64(3_600_000_000, "us")


@pytest.mark.parametrize("name", ["date_of_birth", "DOB", "Geburtsdatum", "born", "patient.dob", "joined"])
def test_a_date_of_birth_is_not_the_time_of_the_rows(tmp_path: Path, name: str) -> None:
    born = pa.table({name: ADULTS, "x": RNG.normal(size=ROWS), "churn": RNG.choice(["yes", "no"], ROWS)})
    _, spec = guessed(tmp_path, born, "churn")
    assert spec.data.time is None
    _, spec = guessed(tmp_path, born.append_column("sent", pa.array(LOGGED)), "churn")
    assert spec.data.time == "sent"


def test_old_records_in_order_and_a_time_after_one_in_the_future_are_the_time(tmp_path: Path) -> None:
    columns = {"x": RNG.normal(size=ROWS), "churn": RNG.choice(["yes", "no"], ROWS)}
    _, spec = guessed(tmp_path, pa.table({"day": np.sort(ADULTS), **columns}), "churn")
    assert spec.data.time == "day"
    due = np.datetime64("2400-01-01", "us") + np.arange(ROWS) * np.timedelta64(3_600_000_000, "us")
    _, spec = guessed(tmp_path, pa.table({"due": due, "sent": LOGGED, **columns}), "churn")
    assert spec.data.time == "sent"


def test_a_column_that_is_missing_with_the_target_is_left_out_with_the_reason(tmp_path: Path) -> None:
    delay = RNG.normal(0, 30, ROWS)
    missing = RNG.random(ROWS) < 0.1
    table = pa.table(
        {
            "delay": pa.array(delay, mask=missing),
            "landed": pa.array(RNG.normal(0, 1, ROWS), mask=missing),
            "distance": RNG.normal(500, 80, ROWS),
        }
    )
    text, spec = guessed(tmp_path, table, "delay > 15")
    assert [feature.columns for feature in spec.features] == [("distance",)]
    assert "landed: is missing where the target is missing" in text


def test_names_that_yaml_or_expressions_would_misread_are_quoted(tmp_path: Path, store: Store) -> None:
    table = CUSTOMERS.select(["Plan", "monthly"]).rename_columns(["on", "amount: €"])
    table = table.append_column("not", pa.array(RNG.integers(0, 2, ROWS)))
    _, spec = guessed(tmp_path, table, "not")
    assert spec.data.target.expression == "`not`"
    assert {column for feature in spec.features for column in feature.columns} == {"on", "amount: €"}
    build_dataset(spec.data, spec.features, spec.etl, store=store)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing):
        draft_table(tmp_path / "gone.parquet")
    with pytest.raises(TargetUnusable, match="did you mean 'churn'"):
        guessed(tmp_path, CUSTOMERS, "chrun")
