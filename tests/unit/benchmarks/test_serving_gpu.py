"""The GPU benchmark without a GPU: how variants are named, and its last line."""

from __future__ import annotations

import pytest

from benchmarks.child import ContenderFailed
from benchmarks.serving.gpu import _line, _of_turn
from benchmarks.serving.gpu_servers import Wanted


def test_a_variant_is_named_by_its_words() -> None:
    found = Wanted.parse("two:instances=2,graphs=0,sizes=1+64+4096")
    assert found.name == "two"
    assert found.serving == {"backend": "onnx_native", "device": "gpu", "instances": 2}
    assert found.split == {"graphs": "0", "sizes": "1,64,4096"}
    with pytest.raises(ContenderFailed, match="what is speed"):
        Wanted.parse("fast:speed=9")


def test_variants_take_part_in_the_first_round_and_the_order_changes() -> None:
    names = ["native", "python", "two"]
    assert _of_turn(names, 0) == names
    assert _of_turn(names, 1) == ["python", "native"]
    assert _of_turn(names, 2) == ["native", "python"]


def test_the_last_line_holds_the_goals_against_the_better_limit() -> None:
    speed = {"native": 70.0, "python": 10.0, "limit, 1 callers": 50.0, "limit, 8 callers": 100.0}
    slow = {**speed, "python": 20.0}
    document = {"1": speed, "64": speed, "512": speed, "4096": slow, "p50_ms": {"native": 1.0, "cpu": 0.8}}
    line = _line(document, [1, 64, 512, 4096])
    assert line["limit_64"] == pytest.approx(0.7)
    assert line["before_512"] == pytest.approx(7)
    assert line["one_row_ms"] == pytest.approx(0.2)
    assert (line["goals_met"], line["goals"]) == (5, 6), (
        "3.5 times the Python backend at 4,096 rows is too little"
    )
