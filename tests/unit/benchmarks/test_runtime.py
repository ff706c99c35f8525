from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from benchmarks.child import Child
from benchmarks.race import Lap, Role, Unequal
from benchmarks.runtime.benchmark import TOLERANCE, _against_best, _race, _too_far_off

BUNDLE = dict.fromkeys(("core", "ort_threads", "fp32_core", "fp32_threads", "plain", "weights", "rows"), "")


class Scores:
    """A contender that is off by so much unless it is asked to be exact."""

    def __init__(self, off: float, seconds: float = 1.0, exact_off: float = 0.0) -> None:
        self.off, self.seconds, self.exact_off = off, seconds, exact_off

    def run(self, request: Mapping[str, Any]) -> Lap:
        off = self.exact_off if request["exact"] else self.off
        return Lap(seconds=self.seconds, peak_bytes=0, answer={"scores": [0.5, 0.5 + off]})


def runners(**contenders: tuple[Role, Scores]) -> dict[str, tuple[Role, Child]]:
    return cast("dict[str, tuple[Role, Child]]", contenders)


def test_who_is_too_far_off_in_a_lower_precision_is_raced_in_fp32_ours_like_the_peers() -> None:
    for ours, openvino, expected in ((0.02, 0.0, ["ours"]), (0.001, 0.02, ["openvino"]), (0.001, 0.001, [])):
        found = runners(
            torch_eager=("peer", Scores(0)), ours=("ours", Scores(ours)), openvino=("peer", Scores(openvino))
        )
        exact = _too_far_off(found, 1, BUNDLE)
        assert list(exact) == expected
        _race(found, 1, BUNDLE, exact, full=False)


@pytest.mark.parametrize("name", ["ours", "ours_fp32", "onnxruntime"])
def test_one_tolerance_holds_for_everybody(name: str) -> None:
    role: Role = "ours" if name.startswith("ours") else "peer"
    found = runners(torch_eager=("peer", Scores(0)), **{name: (role, Scores(2 * TOLERANCE))})
    with pytest.raises(Unequal, match=name):
        _race(found, 1, BUNDLE, {}, full=False)


def test_ours_as_fp32_is_judged_against_the_fastest_peer_too() -> None:
    found = runners(
        torch_eager=("peer", Scores(0, 4.0)),
        ours=("ours", Scores(0, 1.0)),
        ours_fp32=("ours", Scores(0, 2.0)),
        openvino=("peer", Scores(0, 3.0)),
    )
    case = _race(found, 1, BUNDLE, {}, full=False)
    assert (_against_best(case, "ours"), _against_best(case, "ours_fp32")) == (3.0, 1.5)
