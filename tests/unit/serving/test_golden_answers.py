"""How far a release may be from its bundle's answers: as far as the export gate allowed, and no further."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serin.errors import BundleBroken, VerificationFailed
from serin.formats.bundle import Golden, read_golden
from serin.formats.wire import Array
from serin.serving.triton.golden_answers import Allowed, difference_found
from serin.serving.triton.releases import Releases
from serin.store.store import Store
from tests.unit.serving import bundles
from tests.unit.serving.test_releases import INSTALL, V1, FakeHost

ALLOWED = 0.05  # the default of export.variant_tolerance


def moved(answers: dict[str, Array], by: float) -> dict[str, Array]:
    """Away from the bounds of a probability, so that nothing is cut off."""
    score = answers["score"]
    return answers | {"score": np.where(score < 0.5, score + by, score - by).astype(np.float32)}


def verify(folder: Path, monkeypatch: pytest.MonkeyPatch, gate: dict[str, Any] | None, by: float) -> None:
    """A release of a bundle with this gate.json, whose server answers so far from the golden scores."""
    store = Store(str(folder / "store"))
    extra = {} if gate is None else {"gate.json": json.dumps(gate).encode()}
    bundle = bundles.publish(store, bias=0.0, extra=extra)
    golden = read_golden(Path(bundle.path))
    (folder / "backends" / "python").mkdir(parents=True)
    install = replace(INSTALL, backends=folder / "backends")
    releases = Releases(
        folder / "releases", host=FakeHost(), store=store, install=install, devices=lambda: ()
    )
    releases.start(V1)

    def predict(_: str, __: str, rows: dict[str, Array], *___: object, **____: object) -> dict[str, Array]:
        count = len(rows["temp"])
        return moved({name: values[:count] for name, values in golden.outputs.items()}, by)

    monkeypatch.setattr("serin.serving.triton.verify.predict", predict)
    releases.verify(V1)


def gate(*, apart: float | None = None, spread: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"tolerance": 1e-4, "front_core_difference": apart, "runtime": {"spread": spread}, **more}


@pytest.mark.parametrize(
    ("found", "by"),
    [
        (gate(apart=0.05, allowed_difference=ALLOWED), 0.045),
        (gate(apart=1e-3, allowed_difference=ALLOWED), 3.5e-3),
        (gate(spread=1e-5, allowed_difference=1e-4), 3.5e-5),
        (gate(apart=0.04), 0.045),  # of an older export
        (gate(), 5e-6),
        (None, 5e-6),
    ],
)
def test_a_release_may_differ_by_what_the_gate_has_seen_and_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | None, by: float
) -> None:
    verify(tmp_path, monkeypatch, found, by)


@pytest.mark.parametrize(
    ("found", "by"),
    [
        (gate(apart=0.05, allowed_difference=ALLOWED), 0.06),
        (gate(apart=0.05, allowed_difference=ALLOWED), 0.19),
        (gate(apart=1e-3, allowed_difference=ALLOWED), 4.5e-3),
        (gate(spread=0.1, allowed_difference=ALLOWED), 0.06),
        (gate(spread=1e-3, allowed_difference=1e-4), 1.5e-4),
        (gate(apart=0.05), 0.06),
        (gate(spread=0.1), 1.5e-4),
        (gate(), 1.5e-5),
        (None, 1.5e-5),
    ],
)
def test_a_release_that_differs_further_than_the_gate_allowed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | None, by: float
) -> None:
    with pytest.raises(VerificationFailed, match=r"http: 3 of 3 rows differ in 'score' by more than"):
        verify(tmp_path, monkeypatch, found, by)


def test_a_gate_document_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BundleBroken, match=r"gate\.json"):
        verify(tmp_path, monkeypatch, {"front_core_difference": "near"}, 0.0)


@pytest.mark.parametrize(
    ("label", "allowed", "differs"),
    [
        (2, 0.0, False),
        (1, 0.05, False),  # 0.30 against 0.38: both may have moved
        (1, 0.01, True),
        (0, 0.05, True),
        (3, 0.05, True),
        (-1, 0.05, True),
    ],
)
def test_a_label_may_be_another_only_where_its_class_ties_with_the_golden_one(
    label: int, allowed: float, differs: bool
) -> None:
    probabilities = np.asarray([[0.02, 0.30, 0.38]], np.float32)
    golden = Golden(
        inputs={}, outputs={"label": np.asarray([[2]]), "probabilities": probabilities}, row=np.asarray([7])
    )
    answer = {"label": np.asarray([[label]]), "probabilities": probabilities}
    assert bool(difference_found(golden, answer, Allowed(difference=allowed))) == differs
