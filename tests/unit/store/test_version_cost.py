"""What a version cost: the receipts of its stages, also of trainings that were resumed, and how they are shown."""

from pathlib import Path

import pytest

from serin.commands.models import cost_lines
from serin.machine.usage import DeviceCost
from serin.store.receipt import Receipt
from serin.store.version_cost import keep_receipt, read_version_cost

LINEAGE = {"dataset": "d1", "training": "train-t1"}


def receipt(stage: str, started: float, seconds: float, *, gpu: bool = True) -> Receipt:
    device = DeviceCost(
        id="GPU-a" if gpu else "cpu",
        name="Stand-in" if gpu else "A CPU",
        booked_s=seconds,
        busy_share=0.5,
        peak_bytes=2_000_000,
        joules=100.0 * seconds if gpu else None,
    )
    return Receipt(
        stage=stage,
        started=started,
        seconds=seconds,
        device=(device,),
        rows=10,
        rows_per_s=10 / seconds,
        data_wait_share=0.1 if stage == "train" else None,
        mfu=0.25 if stage == "train" else None,
        joules=device.joules,
        cost=0.001 * seconds,
        bound=None,
        advice="",
    )


def test_a_version_s_cost_is_the_sum_of_its_stages_and_of_all_attempts_at_its_training(home: Path) -> None:
    keep_receipt(home, "etl", "d1", receipt("etl", 10, 5, gpu=False))
    keep_receipt(home, "etl", "d1", receipt("etl", 20, 4, gpu=False))  # built again from scratch
    first, second = receipt("train", 30, 7), receipt("train", 40, 3)
    for paid in (first, second, second):  # the last: found again, without another attempt
        keep_receipt(home, "train", "train-t1", paid, resumed=True)
    keep_receipt(home, "train", "train-t1", None, resumed=True)
    keep_receipt(home, "export", "late-v3", receipt("export", 50, 2))
    found = read_version_cost(home, "late-v3", LINEAGE)
    assert found.unknown == ()
    assert found.seconds == 4 + 10 + 2
    assert found.joules == 100 * 12
    assert found.cost == pytest.approx(0.001 * 16)
    assert found.receipts["train"].started == 30
    assert found.gpu_s == pytest.approx(10 + 2)


def test_what_is_not_known_is_named(home: Path) -> None:
    keep_receipt(home, "export", "late-v3", receipt("export", 50, 2))
    found = read_version_cost(home, "late-v3", {})
    assert found.unknown == ("etl", "train")
    assert cost_lines(read_version_cost(home, "late-v4", {})) == []


def test_costs_are_shown_per_stage_and_together(home: Path) -> None:
    keep_receipt(home, "train", "train-t1", receipt("train", 40, 3))
    keep_receipt(home, "export", "late-v3", receipt("export", 50, 2, gpu=False))
    found = read_version_cost(home, "late-v3", LINEAGE)
    text = "\n".join(cost_lines(found))
    print(text)
    assert "train    3.0 s, 300 J, cost 0.0030, on Stand-in, busy 50%, 2.0 MB at most" in text
    assert "waiting for data 10%, MFU 25.0%" in text
    assert "together 5.0 s, 3.0 GPU s, 300 J, cost 0.0050 (unknown: etl)" in text
    assert set(found.to_json()["stages"]) == {"train", "export"}
