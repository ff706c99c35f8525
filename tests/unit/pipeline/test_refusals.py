"""What the controller refuses is one sentence to the user, in whatever form the answer comes."""

from __future__ import annotations

import pytest

from serin.errors import RolloutRefused
from serin.pipeline.roll_out import begin_rollout
from serin.rollout.run.commands import Answer
from serin.spec.rollout import RolloutSpec
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Release


@pytest.mark.parametrize("reason", ["no records", "rollout start of 'flights' refused: no records"])
def test_a_refusal_names_the_command_once(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    answer = Answer(id="1", accepted=False, reason=reason)
    monkeypatch.setattr("serin.pipeline.roll_out.ask_by", lambda *_: answer)
    monkeypatch.setattr("serin.pipeline.roll_out._why_trained", lambda _: "")
    with pytest.raises(RolloutRefused) as refused:
        begin_rollout(ServingSpec(), RolloutSpec(), Release(model="flights", version=1))
    assert str(refused.value) == "rollout start of 'flights' refused: no records"
