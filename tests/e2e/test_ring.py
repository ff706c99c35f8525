"""What the gateway records: every good answer of a drawn request once, whatever serves it, and no client notices."""

import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from serin.formats.serving.lots import is_drawn
from serin.formats.serving.request import Request
from serin.formats.serving.request_log import read_requests
from serin.formats.serving.ring import ALL, ENTRY, GRPC, GZIP, HTTP, LOSSES, PLAIN, SUFFIX
from serin.serving.envoy import rings
from serin.serving.envoy.gateway import PROCESS_NAME, validate
from tests.e2e.ring_scene import INFER, MESSAGE, V1, V2, Record, Scene, read_ring, recording_gateway
from tests.e2e.serving_host import wait_for

RING_BYTES = 4 << 20
NULL = b'{"inputs": [{"name": "temp", "datatype": "FP32", "shape": [2, 1], "data": [0.5, null]}]}'
BODY = NULL.replace(b"null", b"1.5")
LENGTH = "inference-header-content-length"
UNKNOWN = 3  # how an answer is compressed


@pytest.fixture(scope="module")
def gateway() -> Iterator[Scene]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rings, "LARGEST_BYTES", RING_BYTES)
        with recording_gateway() as scene:
            yield scene


@pytest.fixture
def scene(gateway: Scene) -> Scene:
    """With two good servers and empty rings; everything that v1 answers is recorded."""
    for release, server in gateway.servers.items():
        gateway.servers[release].__init__(server.name, endpoint=server.endpoint)  # type: ignore[misc]
    gateway.route(v1=1.0)
    gateway.take()
    return gateway


def taken(scene: Scene, count: int) -> list[Record]:
    """So many records, once they are there: an answer may be at its client before its record is in the ring."""
    found: list[Record] = []

    def complete() -> bool:
        found.extend(scene.take())
        return len(found) >= count

    wait_for(f"{count} records", complete, scene.host, within_s=20)
    return found


def logged(scene: Scene, *ids: str) -> list[Request]:
    found: dict[str, Request] = {}

    def complete() -> bool:
        found.update({each.id: each for each in read_requests(scene.gateway.log).requests})
        return found.keys() >= set(ids)

    wait_for("the log", complete, scene.host)
    return [found[each] for each in ids]


def test_a_json_request_is_recorded_as_it_was_sent_on_with_what_the_log_says(scene: Scene) -> None:
    _, request_id, answer = scene.post(NULL, x_request_id="mine")
    (record,) = taken(scene, 1)
    (line,) = logged(scene, request_id)
    assert line.us is not None
    assert record == Record(
        kind=ENTRY, protocol=HTTP, t=record.t, us=line.us, code=200, grpc=-1, epoch=scene.epoch, share=1.0,
        request_json=ALL, answer_json=ALL, encoding=PLAIN, release=V1.name, arm="stable", id=request_id,
        client_id="mine", model=V1.model, request=NULL.replace(b"null", b"NaN"), answer=answer,
    )  # fmt: skip
    assert record.t == pytest.approx(line.t, abs=2e-6)


def test_binary_tensors_are_recorded_with_the_length_of_the_json_before_them(scene: Scene) -> None:
    text = b'{"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [null]}]}'
    tensors = bytes(range(256))
    server = scene.servers[V1]
    server.answer, server.headers = b'{"outputs": []}' + tensors, {LENGTH: "15"}
    scene.post(text + tensors, **{LENGTH: str(len(text))})
    (record,) = taken(scene, 1)
    written = text.replace(b"null", str(-(2**63)).encode())
    assert (record.request, record.request_json) == (written + tensors, len(written))
    assert (record.answer, record.answer_json) == (server.answer, 15)


def test_a_grpc_call_is_recorded_without_frames(scene: Scene) -> None:
    scene.servers[V1].answer = bytes(range(256)) * 300
    status, request_id = scene.call(metadata=[("x-request-id", "mine")])
    (record,) = taken(scene, 1)
    (line,) = logged(scene, request_id)
    assert status == grpc.StatusCode.OK
    assert (record.protocol, record.code, record.grpc, record.us) == (GRPC, 200, 0, line.us)
    assert (record.request, record.answer) == (MESSAGE, scene.servers[V1].answer)
    assert (record.id, record.client_id, record.arm) == (request_id, "mine", "stable")


def test_how_an_answer_is_compressed_is_recorded(scene: Scene) -> None:
    server = scene.servers[V1]
    packed = zlib.compress(b"{}")
    for server.headers in ({"content-encoding": "gzip"}, {"content-encoding": "br"}):
        server.answer = packed
        scene.post(BODY)
    server.headers, server.compression, server.answer = {}, grpc.Compression.Gzip, b"x" * 5000
    scene.call()
    found = taken(scene, 3)
    assert [record.encoding for record in found] == [GZIP, UNKNOWN, GZIP]
    assert [record.answer for record in found[:2]] == [packed, packed]
    assert zlib.decompress(found[2].answer, 31) == server.answer


def test_only_good_answers_of_inferences_are_recorded(scene: Scene) -> None:
    server = scene.servers[V1]
    for server.status in (400, 404):
        scene.post(BODY)
    server.status = 200
    server.grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    scene.call()
    server.grpc_status = grpc.StatusCode.OK
    scene.post(b'{"inputs": [{"shape": [999999]}]}')  # refused by the gateway
    scene.post(BODY, "/v2/models/nobody/infer")
    _, request_id, _ = scene.post(BODY)
    assert [record.id for record in taken(scene, 1)] == [request_id]


def test_an_answer_that_its_client_did_not_wait_for_is_not_recorded(scene: Scene) -> None:
    scene.servers[V1].delay_s = 0.5
    drawn, _ = scene.counts()
    with socket.create_connection(("127.0.0.1", scene.port)) as wire:
        head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n"
        wire.sendall(head.encode() + BODY)
        wait_for("the request", lambda: scene.servers[V1].asked, scene.host)
    time.sleep(1.0)
    assert scene.take() == []
    assert scene.counts() == (drawn, 0)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_retried_request_is_one_record_of_the_release_that_answered(scene: Scene, protocol: str) -> None:
    failing, good = scene.servers[V2], scene.servers[V1]
    failing.status, failing.grpc_status = 500, grpc.StatusCode.INTERNAL
    scene.route(percent=100.0, v1=1.0, v2=1.0)
    ids = [scene.post(BODY)[1] if protocol == "http" else scene.call()[1] for _ in range(5)]
    found = taken(scene, 5)
    assert [record.id for record in found] == ids
    assert {(record.release, record.arm) for record in found} == {(V1.name, "candidate")}
    assert (failing.asked, good.asked) == (5, 5)


@pytest.mark.parametrize(("slow_s", "answered"), [(6.0, V1), (2.0, V2)])
def test_of_two_releases_that_were_asked_the_one_whose_answer_went_out_counts(
    scene: Scene, slow_s: float, answered: object
) -> None:
    """The candidate hangs, so the stable release is asked as well after a second; either may be the first."""
    scene.servers[V2].delay_s = slow_s
    scene.servers[V1].delay_s = 0.0 if answered == V1 else 6.0
    scene.route(percent=100.0, v1=1.0, v2=1.0)
    _, _, answer = scene.post(BODY)
    (record,) = taken(scene, 1)
    assert (record.release, record.answer) == (answered.name, answer)  # type: ignore[attr-defined]
    assert answered.name.encode() in answer  # type: ignore[attr-defined]
    assert (scene.servers[V1].asked, scene.servers[V2].asked) == (1, 1)


def test_each_release_records_its_own_share_by_the_lot_of_the_id(scene: Scene) -> None:
    scene.route(percent=50.0, v1=0.2, v2=0.6)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: scene.post(BODY), range(200)))
    shares = {V1.name: 0.2, V2.name: 0.6}
    by_id = {request_id: json.loads(answer)["by"] for _, request_id, answer in answers}
    wanted = {request_id for request_id, by in by_id.items() if is_drawn(request_id, shares[by])}
    found = taken(scene, len(wanted))
    assert {record.id for record in found} == wanted
    assert len(found) == len(wanted)
    assert all(
        (record.release, record.share) == (by_id[record.id], shares[record.release]) for record in found
    )
    assert {record.arm for record in found} == {"stable", "candidate"}


def test_a_release_without_a_share_leaves_nothing(scene: Scene) -> None:
    scene.route(v2=1.0)
    scene.post(BODY)
    scene.call()
    assert scene.take() == []


def test_calls_of_a_version_are_recorded_as_pinned(scene: Scene) -> None:
    scene.post(BODY, INFER.replace("/infer", "/versions/1/infer"))
    assert [(record.arm, record.release) for record in taken(scene, 1)] == [("pinned", V1.name)]


def test_a_server_of_somebody_else_is_recorded_as_the_client_wrote_it(scene: Scene) -> None:
    server = scene.servers[V1]
    ours, server.endpoint = server.endpoint, replace(server.endpoint, elsewhere=True)
    try:
        scene.route(v1=1.0)
        scene.post(NULL)
        (record,) = taken(scene, 1)
    finally:
        server.endpoint = ours
    assert (record.request, record.release, record.arm) == (NULL, V1.name, "stable")


def test_new_weights_and_shares_need_no_other_listener(scene: Scene) -> None:
    before = scene.gateway.admin.stats(r"^listener_manager\.listener_(modified|added)$")
    with scene.rings() as found:
        names = [ring.name for ring in found]
    scene.route(percent=10.0, v1=0.5, v2=0.5)
    assert scene.gateway.admin.stats(r"^listener_manager\.listener_(modified|added)$") == before
    with scene.rings() as found:
        assert [ring.name for ring in found] == names


def full_ring(scene: Scene, body: bytes) -> tuple[int, int]:
    """Asks until requests are lost. How many were asked, and lost."""
    before = scene.counts()
    asked = 0
    while scene.counts()[1] == before[1] or asked % 50:
        assert scene.post(body)[0] == 200
        asked += 1
    drawn, lost = (now - then for now, then in zip(scene.counts(), before, strict=True))
    assert drawn == asked
    return asked, lost


def test_a_full_ring_costs_no_request_and_what_is_lost_is_counted_and_told(scene: Scene) -> None:
    asked, lost = full_ring(scene, BODY + b" " * 200_000)
    kept = scene.take()
    assert len(kept) == asked - lost
    assert {record.kind for record in kept} == {ENTRY}
    told = 0
    while told < lost:  # by each worker with its next record
        scene.post(BODY)
        told += sum(record.code for record in scene.take() if record.kind == LOSSES)
    assert told == lost


def test_every_record_is_whole_however_often_a_ring_is_used_from_its_beginning(scene: Scene) -> None:
    bodies = [BODY + b" " * (size * 7919 % 300_000) for size in range(150)]
    answers, found = [], []
    for body in bodies:
        answers.append(scene.post(body)[1])
        if len(answers) % 5 == 0:
            found += taken(scene, 5)
    assert [record.id for record in found] == answers
    assert [record.request for record in found] == bodies
    assert sum(len(record.request) for record in found) > 4 * RING_BYTES


@pytest.mark.parametrize("side", ["request", "answer"])
def test_a_pair_that_is_too_large_is_counted_and_passes(scene: Scene, side: str) -> None:
    drawn, lost = scene.counts()
    many = b" " * (RING_BYTES // 8)
    if side == "answer":
        scene.servers[V1].answer = many
    status, _, answer = scene.post(BODY + many if side == "request" else BODY)
    assert (status, len(answer) >= len(many)) == (200, side == "answer")
    wait_for("the count", lambda: scene.counts() == (drawn + 1, lost + 1), scene.host)
    scene.servers[V1].answer = None
    while not (told := [record for record in scene.take() if record.kind == LOSSES]):
        scene.post(BODY)
    assert [(each.release, each.model, each.code, each.grpc) for each in told] == [(V1.name, V1.model, 0, 1)]


def test_requests_that_wait_for_answers_take_bounded_memory(scene: Scene) -> None:
    """More of them than a ring holds: those beyond it are answered, not recorded, and counted."""
    scene.servers[V1].delay_s = 2.0
    before = scene.counts()
    body = BODY + b" " * 400_000
    with ThreadPoolExecutor(40) as pool:
        statuses = [status for status, _, _ in pool.map(lambda _: scene.post(body), range(40))]
    assert set(statuses) == {200}
    wait_for("all counts", lambda: scene.counts()[0] == before[0] + 40, scene.host)
    lost = scene.counts()[1] - before[1]
    assert lost > 0
    assert sum(record.kind == ENTRY for record in scene.take()) == 40 - lost


def test_the_gateway_leaves_no_core_file_with_what_clients_sent(scene: Scene) -> None:
    gateway = psutil.Process(scene.host.pid(PROCESS_NAME))
    assert gateway.rlimit(psutil.RLIMIT_CORE) == (0, 0)
    scene.post(BODY)
    for path in scene.gateway.rings.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_blocks * 512 >= path.stat().st_size, "allocated whole"
    assert scene.gateway.rings.stat().st_mode & 0o777 == 0o700


def test_what_was_answered_is_in_the_ring_when_the_gateway_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "LARGEST_BYTES", RING_BYTES)
    with recording_gateway() as scene:
        scene.route(v1=1.0)
        answered: list[str] = []
        clients = [threading.Thread(target=_ask_until_gone, args=(scene, answered)) for _ in range(4)]
        for client in clients:
            client.start()
        wait_for("answers", lambda: len(answered) > 200, scene.host)
        with scene.rings() as alive:
            assert not any(ring.is_abandoned() for ring in alive)
        scene.host.kill(PROCESS_NAME)
        for client in clients:
            client.join()
        with scene.rings() as dead:
            assert all(ring.is_abandoned() for ring in dead)
            found = [record for ring in dead for record in read_ring(ring)]
            assert sum(ring.drawn for ring in dead) == len(found)
    ids = [record.id for record in found]
    assert len(ids) == len(set(ids))
    assert set(answered) <= set(ids)


def _ask_until_gone(scene: Scene, answered: list[str]) -> None:
    while True:
        try:
            status, request_id, _ = scene.post(BODY)
        except OSError:
            return
        except Exception:  # noqa: BLE001 http.client's own errors: the connection ended within an answer
            return
        if status == 200:
            answered.append(request_id)


@pytest.mark.parametrize("where", ["on a disk", "no room"])
def test_a_gateway_without_rings_answers_and_says_why_nothing_is_recorded(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = f"{1 << 60} {tmp_path / 'rings'}" if where == "on a disk" else None

    def settings(folder: Path, *_: int) -> str:
        return wanted or f"{1 << 60} {folder}"

    monkeypatch.setattr("serin.serving.envoy.gateway.ring_settings", settings)
    with recording_gateway() as scene:
        scene.route(v1=1.0)
        assert scene.post(BODY)[0] == 200
        assert scene.call()[0] == grpc.StatusCode.OK
        said = scene.gateway.folder / "envoy.log"
        wait_for("the reason", lambda: "requests are not recorded" in said.read_text(), scene.host)
        assert not list(scene.gateway.rings.glob("*"))


def test_settings_that_are_only_checked_leave_no_ring(scene: Scene) -> None:
    before = set(scene.gateway.rings.iterdir())
    validate(scene.gateway.folder / "bootstrap.json", Path("its.yaml"))
    assert set(scene.gateway.rings.iterdir()) == before


def test_a_ring_takes_memory_when_a_request_is_drawn_and_goes_if_it_stays_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rings, "LARGEST_BYTES", RING_BYTES)
    with recording_gateway() as scene:
        scene.route(v1=0.0)
        assert scene.post(BODY)[0] == 200
        assert list(scene.gateway.rings.iterdir()) == []
        scene.servers[V1].status = 500
        scene.route(v1=1.0)
        assert scene.post(BODY)[0] == 500
        (made,) = scene.gateway.rings.iterdir()
        assert made.stat().st_blocks * 512 >= made.stat().st_size > RING_BYTES // 2, "allocated whole"
        scene.host.stop(PROCESS_NAME)
        assert list(scene.gateway.rings.iterdir()) == []


def test_what_is_answered_while_there_is_no_room_for_a_ring_is_counted_once_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rings, "LARGEST_BYTES", RING_BYTES)
    with recording_gateway(workers=1) as scene:
        scene.gateway.rings.rmdir()
        scene.route(v1=1.0)
        for _ in range(7):
            assert scene.post(BODY)[0] == 200
        said = scene.gateway.folder / "envoy.log"
        wait_for("the reason", lambda: "requests are not recorded" in said.read_text(), scene.host)
        scene.gateway.rings.mkdir(0o700)
        sent = 7
        while not list(scene.gateway.rings.glob(f"*{SUFFIX}")):
            assert scene.post(BODY)[0] == 200
            sent += 1
        found = taken(scene, 2)
        kept = [record for record in found if record.kind == ENTRY]
        (lost,) = (record for record in found if record.kind == LOSSES)
        assert (len(kept), lost.release, lost.code + lost.grpc) == (1, V1.name, sent - 1)
        assert scene.counts() == (sent, sent - 1)
