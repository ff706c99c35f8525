"""What a draft notices about a table is in the spec's comments and among the notices; and the spec passes its check."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from serin.draft import table_sample
from serin.draft.guess import Draft, draft_table
from serin.draft.guess_target import guess_target
from serin.errors import LeakFound, TargetUnusable
from serin.etl.build import build_dataset
from serin.etl.dataset.leaks import LEAK_SCORE, NULL_LEAK_SCORE
from serin.pipeline.check import check_spec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store

ROWS = 2000
DRAW = np.random.default_rng(8)
TARGET = DRAW.random(ROWS) < 0.3
PLAIN = {"amount": DRAW.gamma(2, 20, ROWS), "kind": DRAW.choice(["a", "b", "c"], ROWS), "late": TARGET}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))


def drafted(folder: Path, columns: dict[str, Any], target: Any = "late") -> tuple[Draft, PipelineSpec]:
    """The draft, and its spec, which passes its check."""
    pq.write_table(pa.table(columns), folder / "table.parquet", row_group_size=250)
    draft = draft_table(folder / "table.parquet", target)
    (folder / "spec.yaml").write_text(draft.text, encoding="utf-8")
    return draft, check_spec(folder / "spec.yaml").spec


def features(spec: PipelineSpec) -> set[str]:
    return {column for feature in spec.features for column in feature.columns}


def strength(share: float) -> Any:
    """A number that tells the target with about this AUC."""
    return np.where(DRAW.random(ROWS) < 2 * (1 - share), DRAW.random(ROWS), TARGET + DRAW.random(ROWS))


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (DRAW.permutation(ROWS) + 2**53 + 1, "every row has its own integer (2,000 different): an id"),
        (np.arange(ROWS) * 3, "counts the rows"),
        ([f"{row:x}-{row * 7}" for row in range(ROWS)], "every row has its own text (2,000 different): an id"),
        ([f"note {row // 1.2:.0f}" for row in range(ROWS)], "1,666 different texts in 2,000 rows"),
        ([None] * ROWS, "holds no value"),
        (["x"] * ROWS, "holds one value only"),
        ([[1]] * ROWS, "is a list<element: int64>, which nothing can be made of"),
        ([f"{row * 1.5}" if row % 9 else "n/a yet" for row in range(ROWS)], "numbers mixed with text; row 0 of"),
        (TARGET + 0.8 * DRAW.random(ROWS), "alone gives the answer away (1.000 of 1)"),
        (np.where(TARGET, DRAW.random(ROWS), np.nan), "is null or not as the target goes"),
    ],
)  # fmt: skip
def test_a_column_that_is_not_a_feature_is_left_out_with_the_reason(
    tmp_path: Path, column: Any, why: str
) -> None:
    array = pa.array(column, from_pandas=True)
    draft, spec = drafted(tmp_path, {"odd one": array, **PLAIN})
    assert f"#   odd one: {why}" in draft.text
    assert any(notice.startswith(f"odd one (left out): {why}") for notice in draft.notices)
    assert features(spec) == {"amount", "kind"}


def test_an_id_that_repeats_is_a_category_and_a_measurement_is_a_number(tmp_path: Path) -> None:
    few = {name: values[:300] for name, values in PLAIN.items()}
    columns = {"shop_id": DRAW.integers(10**15, 10**15 + 40, 300), "paid": DRAW.permutation(300) * 7, **few}
    draft, _ = drafted(tmp_path, columns)
    assert "# shop_id: an id that repeats, 40 different values" in draft.text
    assert "# paid: numbers from 0 to 2,093" in draft.text


def test_a_draft_drops_a_leak_just_where_the_leak_check_would_refuse_it(tmp_path: Path) -> None:
    when = np.datetime64("2026-01-01") + np.arange(ROWS).astype("timedelta64[s]")
    columns = {"strong": strength(0.96), "when": when, **PLAIN}
    draft, spec = drafted(tmp_path, columns)
    assert "strong" in features(spec)
    assert "alone it predicts the target well (0.9" in draft.text
    build_dataset(spec.data, spec.features, spec.etl, store=Store(str(tmp_path / "store")))

    leak = {**columns, "strong": strength(0.999)}
    assert "strong: alone gives the answer away" in drafted(tmp_path, leak)[0].text
    with pytest.raises(LeakFound, match="strong"):
        build_dataset(spec.data, spec.features, spec.etl, store=Store(str(tmp_path / "store")))
    page = (Path(__file__).parents[3] / "docs/how-to/prepare-data.md").read_text(encoding="utf-8")
    assert f"above {LEAK_SCORE:g}\n" in page
    assert f"(above {NULL_LEAK_SCORE:g}: " in page


def test_repeated_rows_are_counted_and_left_out_by_their_id(tmp_path: Path) -> None:
    twice = np.concatenate([np.arange(ROWS - 30), np.arange(30)])
    columns = {name: np.asarray(values)[twice] for name, values in PLAIN.items()}
    draft, spec = drafted(tmp_path, {"id": (twice * 7919) % 100_003, **columns})
    assert "30 of 2,000 rows repeat another one in every column: one of each is kept" in draft.text
    assert spec.data.unique.by == ("id",)
    dataset = build_dataset(spec.data, spec.features, spec.etl, store=Store(str(tmp_path / "store")))
    assert sum(dataset.rows.values()) == ROWS - 30

    draft, spec = drafted(tmp_path, columns)
    assert spec.data.unique is None
    assert any("30 of 2,000 rows repeat another one" in notice for notice in draft.notices)


def test_rare_positives_get_a_stratified_split_and_advice(tmp_path: Path) -> None:
    rare = np.arange(ROWS) % 250 == 3
    draft, spec = drafted(tmp_path, {**PLAIN, "late": rare})
    assert spec.data.split.kind == "stratified"
    assert any("only 0.40% of the rows are positive" in notice for notice in draft.notices)
    advised = yaml.safe_load(draft.text.replace("# training: {class", "training: {class"))
    assert load_spec(advised).training.class_weights == "balanced"
    assert spec.champion.metric == "average_precision"


def test_a_draft_is_for_trees_and_holds_nothing_that_they_do_not_use(tmp_path: Path) -> None:
    _, spec = drafted(tmp_path, {"gap": pa.array([None, 1.5, 2.5, 3.5] * (ROWS // 4)), **PLAIN})
    assert spec.model.kind == "xgboost"
    assert spec.model_fields_set == {"name", "data", "features", "model"}
    assert {output for feature in spec.features for output in feature.outputs("gap")} >= {
        ("numeric", "gap_missing")
    }


@pytest.mark.parametrize(("days", "parts"), [(700, ("hour", "weekday")), (800, ("hour", "weekday", "month"))])
def test_months_are_features_only_where_training_rows_have_seen_them_all(
    tmp_path: Path, days: int, parts: tuple[str, ...]
) -> None:
    when = np.datetime64("2020-01-01T00:00:00") + np.linspace(0, days * 86400, ROWS).astype("timedelta64[s]")
    _, spec = drafted(tmp_path, {"when": when, **PLAIN})
    (found,) = (feature for feature in spec.features if feature.columns == ("when",))
    assert tuple(name.removeprefix("when_") for name in found.steps[0].names("when")) == parts


def test_a_target_of_many_classes_gets_a_network(tmp_path: Path) -> None:
    draft, spec = drafted(tmp_path, {**PLAIN, "town": [f"town {row % 40}" for row in range(ROWS)]}, "town")
    assert spec.model.kind == "mlp"
    assert "Trees would be grown for each of 40 classes" in draft.text


def test_the_draft_says_which_rows_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = np.arange(ROWS) * 1.5
    whole = drafted(tmp_path, {"growing": growing, **PLAIN})[0]
    assert "guessed from all 2,000 rows." in whole.text
    monkeypatch.setattr(table_sample, "READ_ROWS", 500)
    draft, _ = drafted(tmp_path, {"growing": growing, **PLAIN})
    assert "guessed from 500 of 2,000 rows, spread over the table." in draft.text
    assert "# growing: numbers from " in draft.text
    sample = table_sample.sample_table(str(tmp_path / "table.parquet"))
    rows = sample.columns["growing"].values / 1.5
    assert rows.min() < 0.5 * ROWS < rows.max()


def test_several_targets_are_learnt_together_when_their_tasks_are_alike(tmp_path: Path) -> None:
    _, spec = drafted(tmp_path, PLAIN, ["late", "amount > 40"])
    assert spec.data.target.expressions == {"late": "late", "amount_40": "amount > 40"}
    with pytest.raises(TargetUnusable, match="'late' is binary, 'amount' is regression"):
        drafted(tmp_path, PLAIN, ["late", "amount"])


def test_a_target_is_guessed_among_columns_that_can_be_learnt(tmp_path: Path) -> None:
    texts = [f"text {row}" for row in range(ROWS)]
    columns = {"amount": PLAIN["amount"], "kind": PLAIN["kind"], "note": texts}
    draft, spec = drafted(tmp_path, columns, None)
    assert spec.data.target.expression == "kind"
    assert "the last column that is neither a time nor free text" in draft.text
    with pytest.raises(TargetUnusable, match=r"2,000 different texts.*note == 'text"):
        drafted(tmp_path, columns, "note")
    with pytest.raises(TargetUnusable, match="name a column or an expression with --target"):
        guess_target({}, None)
