"""The version by group: bands that hold, limits that refuse, small groups that are named and not judged."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from serin.errors import GateFailed, SpecError
from serin.export.gate.groups import check_groups
from serin.formats.groups import GroupReport
from serin.formats.schema import Schema, Task, outputs_of
from serin.metrics import estimate, estimate_share
from serin.spec.export import ExportSpec
from serin.spec.load import load_spec
from tests.fakes.small_pipeline import small_spec
from tests.unit.export.small_dataset import spec_for

ROWS = 6000


def people(worse_for: str = "nobody", seed: int = 5) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    """Rows of three groups, one of them small; the scores say nothing about those in `worse_for`."""
    random = np.random.default_rng(seed)
    sex = random.choice(["f", "m", "x", ""], ROWS, p=[0.4, 0.577, 0.02, 0.003])
    target = (random.random(ROWS) < 0.4).astype(np.float32)
    signal = np.where(sex == worse_for, 0.0, 2.0) * (target - 0.5) + random.normal(size=ROWS)
    return pa.table({"sex": sex.tolist()}), target, (1 / (1 + np.exp(-signal))).astype(np.float32)


def judged(groups: dict[str, object], worse_for: str = "nobody", task: Task = "binary") -> GroupReport:
    table, target, scores = people(worse_for)
    export = ExportSpec.model_validate({"segments": ["sex"], "groups": groups})
    schema = Schema(task=task, inputs=(), outputs=outputs_of(task))
    return check_groups(export, schema, table, target, {"score": scores[:, None]})


def test_groups_are_reported_with_bands_and_small_ones_are_named() -> None:
    report = judged({"min_rows": 100})
    found = {one.group: one for one in report.groups}
    assert list(found) == ["sex=m", "sex=f", "sex=x"]
    assert found["sex=x"].rows == people()[0]["sex"].to_pylist().count("x")
    assert report.small == {"sex is null": sum(value == "" for value in people()[0]["sex"].to_pylist())}
    for one in found.values():
        assert one.metric is not None
        assert one.metric.low < one.metric.value < one.metric.high
        assert one.rate is not None
        assert one.gap is not None
        assert one.gap.low < 0 < one.gap.high
    assert found["sex=x"].metric.high - found["sex=x"].metric.low > 0.05
    assert found["sex=f"].metric.high - found["sex=f"].metric.low < 0.05


def test_a_version_that_is_surely_worse_for_one_group_is_refused() -> None:
    with pytest.raises(
        GateFailed, match=r"groups: 1 of 2 groups beyond a limit, .* sex=f: auc 0\.[45]\d+, other rows 0\.9"
    ) as refused:
        judged({"max_gap": 0.1}, worse_for="f")
    assert "(allowed 0.1)" in str(refused.value)
    assert judged({"max_gap": 0.5}, worse_for="f").groups


def test_a_gap_that_may_be_chance_refuses_nothing() -> None:
    """The small group is worse by more than the limit, but so few rows prove nothing."""
    table, target, scores = people()
    sex = np.asarray(table["sex"].to_pylist())
    few = np.flatnonzero(sex == "x")[:30]
    keep = np.concatenate([np.flatnonzero(sex != "x"), few])
    export = ExportSpec.model_validate({"segments": ["sex"], "groups": {"max_gap": 0.0, "min_rows": 20}})
    schema = Schema(task="binary", inputs=(), outputs=outputs_of("binary"))
    report = check_groups(export, schema, table.take(keep), target[keep], {"score": scores[keep, None]})
    gaps = {one.group: one.gap for one in report.groups}
    assert max(gap.value for gap in gaps.values() if gap) > 0


def test_a_selection_rate_that_is_surely_apart_is_refused() -> None:
    table, target, scores = people()
    sex = np.asarray(table["sex"].to_pylist())
    scores = np.where(sex == "f", scores * 0.5, scores).astype(np.float32)
    schema = Schema(task="binary", inputs=(), outputs=outputs_of("binary"))
    limits = {"max_rate_gap": 0.1, "threshold": 0.4}
    export = ExportSpec.model_validate({"segments": ["sex"], "groups": limits})
    with pytest.raises(GateFailed, match=r"sex=f: selection rate 0\.\d+, other rows 0\.\d+: 0\.\d+ apart"):
        check_groups(export, schema, table, target, {"score": scores[:, None]})


def test_a_regression_s_gap_is_a_share_and_has_no_selection_rate() -> None:
    report = judged({"metric": "rmse"}, task="regression")
    (first, _) = report.groups
    assert first.rate is None
    assert report.threshold is None
    assert first.gap is not None
    assert abs(first.gap.value) < 0.2


def test_bands_cover_the_truth_as_often_as_they_say() -> None:
    """The metric of many samples against its value on all rows: 95% bands miss it in about 5%."""
    random = np.random.default_rng(0)
    target = (random.random(200_000) < 0.3).astype(np.float32)
    scores = 1 / (1 + np.exp(-(target + random.normal(size=len(target)))))
    for metric, truth in (("auc", scores), ("logloss", scores), ("accuracy", scores), ("rmse", scores)):
        exact, _ = estimate(metric, target, truth)  # type: ignore[arg-type]
        missed = 0
        for _ in range(300):
            rows = random.integers(0, len(target), 400)
            value, error = estimate(metric, target[rows], truth[rows])  # type: ignore[arg-type]
            missed += abs(value - exact) > 1.96 * error
        assert 4 <= missed <= 27, metric
    assert estimate_share(np.zeros(50))[1] > 0.02


def test_limits_need_columns_to_group_by_and_rates_a_binary_task(tmp_path: object) -> None:
    with pytest.raises(SpecError, match=r"export\.groups: has limits, but export\.segments names no columns"):
        spec_for("binary", export={"groups": {"max_gap": 0.1}})
    with pytest.raises(SpecError, match=r"export\.groups\.max_rate_gap: is for binary targets"):
        spec_for("regression", export={"segments": ["carrier"], "groups": {"max_rate_gap": 0.1}})
    assert load_spec(small_spec(tmp_path, rows=10)).export.groups.max_gap is None  # type: ignore[arg-type]
