"""Requests that no good client would send: no answer from another model, nothing dies or leaks; and steady load."""

from collections.abc import Iterator

import pytest

from tests.e2e.fuzz_gateway import Footprint, footprint, fuzz, healthy_clients, stalled_clients
from tests.e2e.fuzz_messages import FOUR_BYTES, GROUP, GROUP_END, LENGTH, NUMBER, OTHER, Field, written
from tests.e2e.fuzz_requests import framed
from tests.e2e.serving_load import outcome
from tests.e2e.serving_stack import running_stack
from tests.e2e.smuggling import Guarded, guarded
from tests.soak.serving import growths, soak
from tests.unit.serving.bundles import MODEL

MINE, THEIRS = Field(1, LENGTH, MODEL.encode()), Field(1, LENGTH, OTHER.encode())
METHODS = ["ModelInfer", "ModelReady", "ModelMetadata"]
CANNOT_BE_READ = "the message cannot be read"
ONE_MESSAGE = "the request's body must be exactly one message"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Guarded]:
    with guarded() as opened:
        yield opened


SMUGGLED = {
    "behind a number": [MINE, Field(9, NUMBER, 1), THEIRS],
    "behind four bytes": [MINE, Field(9, FOUR_BYTES, bytes(4)), THEIRS],
    "behind a group": [MINE, Field(9, GROUP, b""), Field(9, GROUP_END, b""), THEIRS],
    "twice": [MINE, THEIRS],
    "twice the same": [MINE, MINE],
    "far behind": [MINE, Field(9, LENGTH, bytes(600)), THEIRS],
    "under a tag above 2^32": [MINE, Field(1, LENGTH, OTHER.encode(), too_large=2**32)],
    "under a tag of six bytes": [MINE, Field(1, LENGTH, OTHER.encode(), longer_tag=5)],
    "a second version": [MINE, Field(2, LENGTH, b"1"), Field(2, LENGTH, b"2")],
    "field 0": [MINE, Field(0, LENGTH, b"")],
    "a name that is a number": [MINE, Field(1, NUMBER, 1)],
    "a length that runs on": [MINE, Field(9, LENGTH, b"", lies=9)],
    "a name that is not text": [Field(1, LENGTH, MODEL.encode() + b"\xff")],
}


@pytest.mark.parametrize("method", METHODS)
def test_a_message_that_two_readers_could_take_differently_is_refused(endpoint: Guarded, method: str) -> None:
    answers = {name: endpoint.call(framed(written(fields)), method) for name, fields in SMUGGLED.items()}
    assert answers == dict.fromkeys(SMUGGLED, ("3", CANNOT_BE_READ))
    one = framed(written([MINE]))
    for frame in (one + framed(written([THEIRS])), one + b"x", framed(b"") + one, one[:-1], one[:5]):
        assert endpoint.call(frame, method) == ("3", ONE_MESSAGE)
    assert endpoint.call(framed(written([THEIRS])), method) == ("7", "this key may not ask for this model")
    assert endpoint.call(one, method)[1][0] == [MODEL, ""]
    version = [
        Field(2, LENGTH, b"1"),
        Field(9, NUMBER, 1),
        MINE,
        Field(77, LENGTH, b"new in a later protocol"),
    ]
    assert endpoint.call(framed(written(version)), method)[1][0] == [MODEL, "1"]


def test_drawn_messages_get_answers_of_the_keys_model_alone(endpoint: Guarded) -> None:
    found = endpoint.smuggle(number=1, count=300)
    print(dict(found.statuses))
    assert found.wrong == []
    assert found.statuses["0"] > 20


PATHS = [
    f"/v2/models/{OTHER}/infer",
    f"/v2/models/{MODEL}/../{OTHER}/infer",
    f"/v2/models/{MODEL}/%2e%2e/{OTHER}/infer",
    f"/v2/models/{MODEL}/..%2f{OTHER}/infer",
    f"/v2/models/{MODEL}%2f..%2f{OTHER}/infer",
    f"//v2//models//{OTHER}//infer",
    f"/v2/models/{OTHER}%2finfer",
    "/v2/models/%6f%74%68%65%72/infer",
    f"/v2/%6dodels/{OTHER}/infer",
    f"/v2/models/{MODEL}\\..\\{OTHER}/infer",
    f"/v2/models/{OTHER};{MODEL}/infer",
    f"/v2/models/{OTHER}/infer?{MODEL}",
    f"/v2/models/{OTHER}?/v2/models/{MODEL}/infer",
    f"/v2/models/{MODEL}?/../{OTHER}/infer",
    f"/v2/models/{MODEL},{OTHER}/infer",
    f"/v2/models/{OTHER}#/v2/models/{MODEL}/infer",
    f"/v2/models/{MODEL}#/../{OTHER}/infer",
    f"/V2/models/{OTHER}/infer",
    f"/v2/./models/{OTHER}/infer",
    f"http://{MODEL}/v2/models/{OTHER}/infer",
    f"/v2/models/{MODEL}/infer/../../{OTHER}/infer",
    f"/v2/health/../models/{OTHER}/infer",
    f"/v2/health/live/../../models/{OTHER}/infer",
    f"/v2/models/{OTHER}",
    f"/v2/models/{OTHER}/ready",
    f"/v2/models/{OTHER}/versions/1/infer",
]


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_no_spelling_of_a_path_reaches_another_model(endpoint: Guarded, method: str) -> None:
    for path in PATHS:
        status, text = endpoint.ask(method, path)
        assert status in (400, 403, 404) or (status == 200 and OTHER not in text.partition("?")[0]), (
            path,
            status,
            text,
        )
    asked = {"host": OTHER, "x_envoy_original_path": f"/v2/models/{OTHER}/infer", "x_serin_model": OTHER}
    path = f"/v2/models/{MODEL}/infer" if method == "POST" else f"/v2/models/{MODEL}/ready"
    assert endpoint.ask(method, path, **asked) == (200, path)
    wrong = f"/v2/models/{OTHER}/infer" if method == "POST" else f"/v2/models/{OTHER}/ready"
    for name in ("x_serin_may", "x_serin_model", "x_http_method_override", "x_rewrite_url", "x_original_url"):
        assert endpoint.ask(method, wrong, **{name: f",{OTHER},"})[0] == 403


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


SECONDS = 16.0


def test_load_fails_nothing_and_leaves_nothing_behind() -> None:
    with running_stack() as stack:
        soaked = soak(stack, SECONDS, every_s=0.25, memory_share=0.05, warm_up=0.5)
    print(outcome(soaked.results), *soaked.growths, sep="\n")
    assert soaked.faults == []
    assert all(result.requests > SECONDS for result in soaked.results)


@pytest.mark.parametrize("leak", ["rss_mb", "files", "shared_mb"])
def test_a_leak_is_seen_in_noise(leak: str) -> None:
    times = [float(second) for second in range(100)]
    held = []
    for second in range(100):
        noise = (second * 7919) % 11 - 5
        values = {"rss_mb": 500 + noise / 2, "files": 300 + noise % 2, "shared_mb": 16.0}
        values[leak] *= 1 + 0.0008 * second
        held.append(Footprint((1,), values["rss_mb"], int(values["files"]), values["shared_mb"]))
    grown = {growth.what: growth.grew > growth.allowed for growth in growths(times, held, 0.02)}
    names = {"rss_mb": "resident memory", "files": "descriptors", "shared_mb": "shared memory"}
    assert grown == {what: what == names[leak] for what in names.values()}
