"""Two thousand requests that no good client would send: nothing dies, nothing leaks, nobody else notices."""

from __future__ import annotations

from tests.e2e.fuzz_gateway import footprint, fuzz, healthy_clients, stalled_clients
from tests.e2e.serving_stack import running_stack


def test_bad_requests_are_answered_as_such_and_harm_nobody() -> None:
    with running_stack() as stack, healthy_clients(stack) as healthy, stalled_clients(stack.port, 20):
        begun = footprint(stack)
        first = fuzz(
            stack, 500, number=1
        )  # until everything has been loaded and every buffer was needed once
        warm = footprint(stack)
        second = fuzz(stack, 1500, number=2)
        end = footprint(stack)
        asked = healthy.answered
    seen = dict(sorted((first.seen + second.seen).items()))
    print(f"answers: {seen}\nbegun: {begun}\nwarm:  {warm}\nend:   {end}")
    print(f"{asked} good requests beside them, the slowest took {healthy.slowest_ms:.0f} ms")
    assert first.requests + second.requests == 2000
    assert first.wrong + second.wrong == {}, {**first.examples, **second.examples}
    assert end.pids == begun.pids
    assert healthy.failed == []
    assert asked > 50
    assert end.files < warm.files + 50, "descriptors"
    assert end.shared_mb < warm.shared_mb + 8, "shared memory"
    assert end.rss_mb < warm.rss_mb + 100, "memory"
