"""The quality guard: labels can fail a candidate in its bake, and only there where a spec asks for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serin.formats.serving.quality_evidence import QualityBlocks, read_quality_blocks, write_quality_blocks
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.quality import bet_on_quality
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.decide.verdict import Verdict, fails_by_latency_alone, weigh
from serin.rollout.run.judge import LogJudge
from serin.rollout.run.record import JournalFolder
from serin.store.artifacts import Release
from tests.unit.rollout.conftest import Scene
from tests.unit.rollout.test_judge import SHIFTING, V2, T, write

BAKING = replace(SHIFTING, phase=Phase.BAKING, step=1)
LIMIT = 0.17


def labels(mean: float, blocks: int, *, before: int = 0) -> QualityBlocks:
    """Blocks of a minute with this mean loss, and such with a terrible one from before the rollout."""
    old = [(T - 60.0 * number, 0.9, 50) for number in range(before)]
    new = [(T + 60.0 * (number + 1), mean, 50) for number in range(blocks)]
    return QualityBlocks(loss_name="brier", offline=0.15, limit=LIMIT, blocks=(*old, *new))


def judged(tmp_path: Path, blocks: QualityBlocks | None, rollout: Rollout = BAKING):  # type: ignore[no-untyped-def]
    log = tmp_path / "requests.jsonl"
    write(log, *(T + i / 4 for i in range(60)))
    return LogJudge(log, quality=lambda release: blocks if release == V2 else None).judge(rollout, T + 70)


def test_a_candidate_whose_answers_are_worse_than_allowed_fails_in_its_bake(tmp_path: Path) -> None:
    found = judged(tmp_path, labels(0.34, 30))
    assert found.verdict is Verdict.FAIL
    assert found.reason == (
        "its answers are worse than its quality objective allows; a good version looks like this in at most 1% of "
        "rollouts; its mean brier is 0.34 on 1500 labelled rows, at most 0.17 is allowed (0.15 on the test rows)"
    )
    journaled = json.loads(json.dumps(found.evidence))["guards"]["quality"]
    assert (journaled["rows"], journaled["limit"], journaled["e_value"] > 1000) == (1500, LIMIT, True)
    assert Evidence.from_json(found.evidence["guards"]).quality is not None
    assert not found.latency_alone


@pytest.mark.parametrize(
    "blocks",
    [
        None,
        labels(0.15, 500),
        labels(0.17, 500),
        labels(0.34, 3),
        labels(0.34, 0),
        labels(0.15, 20, before=200),
    ],
)
def test_it_passes_when_its_labels_are_good_too_few_or_of_an_earlier_rollout(
    tmp_path: Path, blocks: QualityBlocks | None
) -> None:
    assert judged(tmp_path, blocks).verdict is Verdict.PASS


def test_a_rollback_needs_no_labels(tmp_path: Path) -> None:
    asked = replace(BAKING, plan=replace(BAKING.plan, min_requests=0))
    found = judged(tmp_path, labels(0.34, 30), asked)
    assert found.verdict is Verdict.PASS
    assert "quality" not in found.evidence["guards"]


def test_the_guards_share_one_error_probability() -> None:
    plan = SHIFTING.plan
    bet = bet_on_quality([(T + 1, 0.34, 50)] * 30, since=T, loss_name="brier", offline=0.15, limit=LIMIT)
    with_labels, without = (weigh(plan, Evidence(quality=each)) for each in (bet, None))
    assert without.total == pytest.approx(1.0)
    assert with_labels.total == pytest.approx(0.8 + 0.2 * bet.e_value)
    assert not fails_by_latency_alone(plan, Evidence(quality=bet))


def test_a_candidate_at_the_limit_is_failed_no_more_often_than_the_spec_says() -> None:
    random, failed, rollouts = np.random.default_rng(5), 0, 500
    for _ in range(rollouts):
        means = random.binomial(20, LIMIT, 200) / 20
        worst = max(
            weigh(SHIFTING.plan, Evidence(quality=bet_on_quality(
                [(T + 1, float(mean), 20) for mean in means[:end]], since=T, loss_name="b", offline=0.15, limit=LIMIT
            ))).total
            for end in (50, 100, 150, 200)
        )  # fmt: skip
        failed += worst >= SHIFTING.plan.rollback_at
    assert failed <= 0.01 * rollouts


def test_evidence_goes_through_a_file_and_one_that_is_broken_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "watch" / "quality" / "flights"
    folder.mkdir(parents=True)
    write_quality_blocks(folder, {"flights-v2": labels(0.2, 3)})
    assert read_quality_blocks(tmp_path, "flights", "flights-v2") == labels(0.2, 3)
    assert read_quality_blocks(tmp_path, "flights", Release(model="flights", version=1).name) is None
    (folder / "evidence.json").write_text("{")
    assert read_quality_blocks(tmp_path, "flights", "flights-v2") is None


def test_a_rollout_in_its_bake_is_rolled_back_when_labels_come_that_are_worse(scene: Scene) -> None:
    folder = scene.home / "watch" / "quality" / "flights"
    folder.mkdir(parents=True)
    log = scene.home / "requests.jsonl"
    log.touch()
    scene.judge = LogJudge(log, quality=lambda it: read_quality_blocks(scene.home, it.model, it.name))  # type: ignore[assignment]
    scene.promote_first()
    scene.command("start", 2, plan=Plan(steps=(100.0,), min_requests=1, bake_s=3600.0))
    scene.until(Phase.BAKING)
    write_quality_blocks(folder, {"flights-v2": labels(0.15, 0)})
    scene.tick(5)
    began = scene.clock.now()
    worse = tuple((began + 60.0 * number, 0.34, 50) for number in range(30))
    write_quality_blocks(folder, {"flights-v2": replace(labels(0.15, 0), blocks=worse)})
    scene.kill()  # another one resumes
    now = scene.until(Phase.ROLLED_BACK)
    assert now.live == Release(model="flights", version=1)
    scene.kill()
    decisions = JournalFolder(scene.home).open("flights").all()
    failed = next(each for each in decisions if each.verdict == "fail")
    assert "its mean brier is 0.34 on 1500 labelled rows, at most 0.17 is allowed" in failed.reason
    assert failed.evidence["guards"]["quality"]["blocks"] == 30
