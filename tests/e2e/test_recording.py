"""Requests of real releases are recorded as they were sent and answered, whatever their backend and protocol."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from serin.formats.serving.lots import is_drawn
from serin.serving.client.client import Client, Protocol
from serin.serving.native.onnx_backend import NATIVE
from serin.serving.triton.installation import find_triton
from serin.store.artifacts import Release
from tests.e2e.recording_stack import MODEL, SCHEMA, Recorder, RecordingStack, recording_stack
from tests.e2e.serving_host import wait_for
from tests.unit.serving import bundles

pytestmark = pytest.mark.skipif(
    NATIVE not in find_triton().describe(gpus=False).backends,
    reason="Triton was installed without a C++ compiler: run `serin install triton` where there is one",
)
BACKENDS = ("onnx_native", "onnx_python")
ODD = {"long": "x" * 500, "quotes": 'a"b\\', "bytes": "caf\xe9 \x80"}


def _spec(backend: str, share: float) -> str:
    return (
        f"serving: {{backend: {backend}, request_timeout: 20s, instances: 2}}\n"
        f"monitoring: {{capture: {{share: {share}}}}}\n"
    )


@pytest.fixture(scope="module")
def stack() -> Iterator[RecordingStack]:
    specs = {backend: _spec(backend, 1.0) for backend in BACKENDS}
    with recording_stack(**specs, tenth=_spec("onnx_native", 0.1)) as running:
        yield running


def _ask_by(recorder: Recorder, protocol: str, number: int, **headers: str) -> str:
    rows = bundles.rows((1, 7, 40)[number % 3], seed=number)
    if protocol == "json":
        rows["temp"] = np.nan_to_num(rows["temp"])  # JSON has no NaN
    found: str = getattr(recorder, protocol)(rows, **headers)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_is_recorded_as_it_was_sent_and_answered(stack: RecordingStack, backend: str) -> None:
    recorder, release = stack.recorder(backend), stack.by_name[backend]
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(_ask_by, recorder, protocol, number, x_request_id=f"mine-{number % 4}")
            for number in range(12)
            for protocol in ("json", "binary", "grpc")
        ]
        ids = [job.result() for job in jobs]
    recorder.json({**bundles.rows(1), "temp": np.zeros((1, 1), np.float32)}, kserve="of the body")
    assert len(set(ids)) == len(ids), "the gateway's id is unique, whatever the client sends"
    stack.wait_for_requests(release, len(ids) + 1)
    assert stack.recorded(release) == recorder.rows


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_client_knows_by_which_ids_its_rows_were_recorded(
    stack: RecordingStack, protocol: Protocol
) -> None:
    release = stack.by_name["onnx_native"]
    before = _waiting(stack, release)
    url = f"127.0.0.1:{stack.port}"
    with Client(url, MODEL, version=release.version, protocol=protocol, batch_rows=3) as client:
        answers = client.predict_wire(bundles.rows(7), SCHEMA, client_id="order 17")
    assert answers.request_row.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert len(set(answers.request_id)) == 3
    stack.wait_for_requests(release, before + 3)
    recorded = stack.recorded(release)
    rows = [recorded[key] for key in zip(answers.request_id, answers.request_row.tolist(), strict=True)]
    assert [row.got[0] for row in rows] == [score.tobytes() for score in answers["score"]]
    assert {row.client_id for row in rows} == {"order 17"}


def test_ids_of_clients_are_kept_or_cut_and_never_hurt(stack: RecordingStack) -> None:
    recorder = stack.recorder("onnx_python")
    release = stack.by_name["onnx_python"]
    before = _waiting(stack, release)
    found = {name: _ask_by(recorder, "binary", 0, x_request_id=value) for name, value in ODD.items()}
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    found["trace"] = _ask_by(recorder, "binary", 0, traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    stack.wait_for_requests(release, before + len(found))
    recorded = stack.recorded(release)
    clients = {name: recorded[id_, 0].client_id for name, id_ in found.items()}
    assert clients == {"long": "x" * 128, "quotes": ODD["quotes"], "bytes": "", "trace": ""}
    logged: dict[str, Any] = {}

    def complete() -> bool:
        rows = map(json.loads, stack.gateway.log.read_text().splitlines())
        logged.update({row["id"]: row for row in rows})
        return logged.keys() >= set(found.values())

    wait_for("the log's lines", complete, stack.host)
    said = {name: logged[id_]["client_id"] for name, id_ in found.items()}
    assert said == {**clients, "bytes": None, "trace": None}
    assert trace in logged[found["trace"]]["trace"]


def test_lots_are_drawn_by_the_gateways_id(stack: RecordingStack) -> None:
    recorder, release = stack.recorder("tenth"), stack.by_name["tenth"]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda number: _ask_by(recorder, "binary", 3 * number), range(150)))
    drawn = {id_ for id_ in ids if is_drawn(id_, 0.1)}
    assert 0 < len(drawn) < len(ids)
    stack.wait_for_requests(release, len(drawn))
    recorded = stack.recorded(release)
    assert {id_ for id_, _ in recorded} == drawn
    assert all(row == recorder.rows[key] for key, row in recorded.items())


def _waiting(stack: RecordingStack, release: Release) -> int:
    with stack.entries(release) as entries:
        return len(entries)
