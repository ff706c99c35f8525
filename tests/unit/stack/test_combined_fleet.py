"""Two versions share clients only if the same requests fit both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import RequestsDiffer
from serin.formats.schema import InputColumn, OutputTensor, Schema
from serin.serving.external import External
from serin.stack.combined_fleet import CombinedFleet
from serin.store.artifacts import Release
from tests.fakes.rollout import FakeFleet

LIVE, NEW = Release(model="m", version=1), Release(model="m", version=2)
A = InputColumn(name="a", dtype="FP32", kind="float", null="NaN")
B = InputColumn(name="b", dtype="BYTES", kind="string", null='""')
SCORE = OutputTensor(name="score", dtype="FP32", dims=(1,))
SCHEMA = Schema(task="binary", inputs=(A,), outputs=(SCORE,))
LABEL = OutputTensor(name="label", dtype="INT64", dims=(1,))


def check(tmp_path: Path, new: Schema, *, share: bool = True) -> None:
    schemas = {LIVE: SCHEMA, NEW: new}
    CombinedFleet(FakeFleet(), External(tmp_path), schemas.__getitem__).check_fits(NEW, LIVE, share=share)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (replace(SCHEMA, inputs=(A, B)), "it also asks for b"),
        (replace(SCHEMA, inputs=(B,)), "it also asks for b, it does not take a"),
        (replace(SCHEMA, inputs=(replace(B, name="a"),)), "it takes another type for a"),
        (replace(SCHEMA, outputs=(LABEL,)), "it answers differently in score"),
    ],
)
def test_a_version_whose_requests_or_answers_differ_does_not_share_clients(
    tmp_path: Path, new: Schema, reason: str
) -> None:
    with pytest.raises(RequestsDiffer, match=rf"m-v2 cannot share clients with m-v1: {reason}\."):
        check(tmp_path, new)
    check(tmp_path, new, share=False)  # all clients change at once


@pytest.mark.parametrize("new", [SCHEMA, replace(SCHEMA, outputs=(SCORE, LABEL))])
def test_a_version_that_takes_the_same_requests_shares_clients(tmp_path: Path, new: Schema) -> None:
    check(tmp_path, new)
