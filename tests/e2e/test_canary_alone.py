"""A canary between two servers that are not ours, behind a real Envoy, judged from its log."""

from __future__ import annotations

from serin.rollout.decide.state import Phase
from serin.store.artifacts import Endpoint, Release
from tests.e2e.external_scene import asking, scene
from tests.fakes.kserve import MODEL, serving


def test_between_any_two_servers_an_equal_one_takes_over_and_a_slow_one_is_rolled_back() -> None:
    with (
        scene() as stack,
        serving(delay_s=0.004) as stable,
        serving(datatype="INT64") as unfit,
        serving(delay_s=0.004) as equal,
        serving(delay_s=0.08) as slow,
    ):
        stack.start(stable)
        stack.until(Phase.PROMOTED, version=1, within_s=60)
        stack.start(unfit)
        refused = stack.until(Phase.ROLLED_BACK, version=2, within_s=60)
        assert "'x' INT64 [-1, 1] differ from those of sentiment-v1" in refused.reason
        assert unfit.asked == 0
        with asking(stack.port) as clients:
            stack.start(slow)
            back = stack.until(Phase.ROLLED_BACK, Phase.PROMOTED, version=3, within_s=200)
            assert (back.phase, back.live) == (Phase.ROLLED_BACK, Release(model=MODEL, version=1))
            assert "slower than allowed" in back.reason
            asked = slow.asked
            plain = equal.address
            stack.start(equal)
            done = stack.until(Phase.ROLLED_BACK, Phase.PROMOTED, version=4, within_s=200)
            assert done.phase is Phase.PROMOTED, done.reason
            assert done.live == stack.external.register(MODEL, Endpoint(http=plain, grpc=plain))
            assert slow.asked == asked
        assert clients.errors == []
        assert clients.answered > 200
