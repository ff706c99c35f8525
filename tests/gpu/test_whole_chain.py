"""Two versions through `pipeline/placed` on a real GPU: leases, receipts, a rollout under load. Skipped, with the
reason, where there is no GPU or no Triton with ONNX Runtime's CUDA provider.

One story in one test, since every part of it needs what the part before has built.
"""

from pathlib import Path
from typing import Any

import pytest

from serin.machine.hardware import inventory
from serin.store.receipt import Receipt
from tests.e2e.whole_stack import Stack
from tests.fakes.small_pipeline import NAME
from tests.gpu.parts import why_no_release
from tests.gpu.whole_chain import Placed, describe, run_chain

_WHY = why_no_release()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)


@pytest.mark.timeout(900)
def test_two_versions_are_placed_leased_paid_for_and_rolled_out_under_load(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="cupy is not installed")
    pytest.importorskip("prefect", reason="Prefect is not installed")
    stack = Stack(tmp_path / "home", gpus=None, SERIN_PRICE_PER_HOUR="3.5")
    try:
        stack.serin("up")
        found = run_chain(stack, tmp_path, gpu=True)
        print(describe(found))
        for placed in (found.first, found.second):
            check_receipts(placed)
        assert (found.first.version, found.second.version) == (1, 2)
        assert found.load.requests > 100
        assert found.load.failed == 0, found.load.errors
        stages = {f"{stage} of {NAME}" for stage in ("dataset", "training", "export")}
        assert found.log.purposes() == stages
        assert found.log.shown_purposes() <= stages
        assert found.log.shown_purposes(), "serin gpus has shown no holder"
        assert {f"{NAME}-v1", f"{NAME}-v2"} in found.log.shown_releases(), "both while they were rolled out"
        check_costs(found.costs)
        assert "did not stop" not in stack.serin("down")
    finally:
        stack.kill()


def check_receipts(placed: Placed) -> None:
    """Every stage paid for the GPU that it held."""
    known = {device.id for device in inventory()}
    for stage, receipt in placed.receipts.items():
        assert {cost.id for cost in receipt.device} <= known, stage
        for cost in receipt.device:
            assert cost.busy_share is not None, stage
            assert cost.peak_bytes is not None, stage
            assert cost.peak_bytes > 0, stage
            assert cost.joules is not None, stage
            assert cost.joules > 0, stage
        assert receipt.cost is not None, stage
        assert receipt.cost > 0, stage
    check_training(placed.receipts["train"])


def check_costs(costs: dict[str, Any]) -> None:
    """Of a version: all its stages."""
    assert costs["unknown"] == []
    assert costs["joules"] > 0
    assert costs["cost"] > 0


def check_training(receipt: Receipt) -> None:
    assert receipt.data_wait_share is not None
    assert receipt.mfu is not None
    assert 0 < receipt.mfu <= 1
