"""The backend of our own in a real Triton: the same bits as the Python one, also of a model in two parts."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from serin.errors import PredictionFailed
from serin.formats.wire import Array
from serin.serving.client.client import Protocol, predict
from serin.serving.native.onnx_backend import NATIVE
from serin.serving.triton.installation import find_triton
from serin.serving.triton.releases import Releases
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.split_triton import serving_split
from tests.kit.web import ask
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

pytestmark = pytest.mark.skipif(
    NATIVE not in find_triton().describe(gpus=False).backends,
    reason="Triton was installed without a C++ compiler: run `serin install triton` where there is one",
)
BACKENDS = ("onnx_native", "onnx_python")
FAR = 100  # a distance that the graph's table does not have


class Both:
    """One graph in two releases, by backend. Requests wait a little for company, so that they share batches."""

    def __init__(self, folder: Path) -> None:
        self.host, store = ChildHost(), Store(str(folder / "store"))
        self.releases = Releases(folder / "releases", host=self.host, store=store, devices=lambda: ())
        self.by_backend: dict[str, Release] = {}
        for backend in BACKENDS:
            spec = f"serving: {{backend: {backend}, queue_delay: 20000us}}\n"
            bundle = bundles.publish(store, bias=0.0, spec=spec, extra={"model.onnx": choking_graph()})
            self.by_backend[backend] = Release(model=bundle.model, version=bundle.version)
            self.graph = bundle.path
        for release in self.by_backend.values():
            self.releases.start(release)
        for release in self.by_backend.values():
            ready = lambda release=release: self.releases.state(release) == "ready"  # noqa: E731
            wait_for(release.name, ready, self.host, release.name)

    def answer(self, backend: str, columns: dict[str, Array], protocol: Protocol = "http") -> Array | str:
        """The scores, or what was said instead."""
        release = self.by_backend[backend]
        address = getattr(self.releases.endpoint(release), protocol)
        try:
            return predict(address, MODEL, columns, SCHEMA, protocol, release.version)["score"]
        except PredictionFailed as refused:
            return f"{refused.fields['status']} {refused.fields['reason']}"

    def close(self) -> None:
        for release in self.by_backend.values():
            self.host.kill(release.name)  # that it goes in peace is shown elsewhere
            self.releases.stop(release)
        self.host.stop_all()


def choking_graph() -> bytes:
    """The usual one, plus a look into a table that has distances from -3 to 3."""
    model = bundles.graph(0.0)
    model.graph.node[-1].input[0] = "both"
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array(3, np.int64), "three"),
            numpy_helper.from_array(np.arange(7, dtype=np.float32), "table"),
        ]
    )
    last = model.graph.node.pop()
    model.graph.node.extend(
        [
            helper.make_node("Add", ["distance", "three"], ["place"]),
            helper.make_node("Gather", ["table", "place"], ["found"]),
            helper.make_node("Add", ["logit", "found"], ["both"]),
            last,
        ]
    )
    assert model.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    folder = Path(tempfile.mkdtemp(prefix="serin-e2e-"))
    try:
        running = Both(folder)
        try:
            yield running
        finally:
            running.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def texts(*values: bytes | str) -> dict[str, Array]:
    return {**bundles.rows(len(values)), "carrier": np.array(values, dtype=object).reshape(-1, 1)}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_they_answer_with_the_graph_s_own_bits(both: Both, protocol: Protocol) -> None:
    for columns in (bundles.rows(1), bundles.rows(40), texts("", "a\0b", "Zürich 雪", "\U0001f600", "AA\0")):
        own = bundles.score(both.graph, columns)
        for backend in BACKENDS:
            assert np.array_equal(both.answer(backend, columns, protocol), own), (backend, columns)


def test_they_answer_json_as_the_gateway_writes_it(both: Both) -> None:
    columns = bundles.rows(40)
    own = bundles.score(both.graph, columns).ravel()
    for release in both.by_backend.values():
        found = bundles.asked_in_json(both.releases.endpoint(release).http, release.version, columns)
        np.testing.assert_allclose(found, own, rtol=1e-6)


WRONG: dict[str, dict[str, Array]] = {
    "not UTF-8": texts(b"AA", b"\xff"),
    "half a character": texts(b"\xc3", b"\xa9"),
    "a surrogate": texts(b"\xed\xa0\x80"),
    "too long a form": texts(b"\xc0\xaf"),
    "beyond Unicode": texts(b"\xf4\x90\x80\x80"),
    "a long text": texts(b"x" * 70_000),
    "no bool": {**bundles.rows(2), "night": np.array([[1], [-2]], np.int8)},
    "what the graph chokes on": {**bundles.rows(1), "distance": np.array([[FAR]], np.int64)},
}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("wrong", WRONG)
def test_they_refuse_the_same_in_the_same_words(both: Both, wrong: str, protocol: Protocol) -> None:
    native, python = (both.answer(backend, WRONG[wrong], protocol) for backend in BACKENDS)
    assert isinstance(native, str)
    assert native == python
    assert "/" not in native.replace("UTF-8", "")


def test_any_bytes_are_judged_as_python_judges_them(both: Both) -> None:
    draw = np.random.default_rng(5)
    pieces = [
        b"a",
        b"\x80",
        b"\xbf",
        b"\xc2\xa2",
        b"\xe0\xa0\x80",
        b"\xe0\x9f",
        b"\xef\xbf\xbf",
        b"\xf0\x9f\x98",
    ]
    pieces.append(b"\xf4\x8f\xbf\xbf")
    columns = [texts(b"".join(draw.choice(pieces, size=3))) for _ in range(120)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda each: both.answer("onnx_native", each), columns))
    for each, answer in zip(columns, answers, strict=True):
        try:
            each["carrier"][0, 0].decode()
        except UnicodeDecodeError:
            assert answer == "400 input 'carrier': row 0 is not UTF-8"
        else:
            assert not isinstance(answer, str), each["carrier"]


def test_who_shares_a_batch_with_a_request_at_fault_does_not_pay_for_it(both: Both) -> None:
    good = bundles.rows(3)
    own = bundles.score(both.graph, good)
    asked = [WRONG["what the graph chokes on"], WRONG["not UTF-8"], *[good] * 10] * 4
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: both.answer("onnx_native", each), asked))
    for columns, answer in zip(asked, answers, strict=True):
        assert isinstance(answer, str) if columns is not good else np.array_equal(answer, own)
    log = both.releases.log(both.by_backend["onnx_native"]).read_text()
    assert "scoring failed" in log
    assert _statistics(both)["batches"] < _statistics(both)["requests"], "nobody shared a batch"


def _statistics(both: Both) -> dict[str, int]:
    place = both.releases._place(both.by_backend["onnx_native"])
    counted = ask(place.metrics_port, "/metrics").text
    names = {"requests": "nv_inference_count", "batches": "nv_inference_exec_count"}
    found = {
        what: re.findall(rf"^{name}{{.*}} (\d+)$", counted, re.MULTILINE) for what, name in names.items()
    }
    return {what: sum(map(int, values)) for what, values in found.items()}


def test_only_the_outputs_that_are_asked_for_are_given(both: Both) -> None:
    release = both.by_backend["onnx_native"]
    columns = bundles.rows(1)
    inputs: list[dict[str, Any]] = [
        {"name": each.name, "datatype": each.dtype, "shape": [1, 1], "data": columns[each.name].reshape(-1).tolist()}
        for each in reversed(SCHEMA.inputs)
    ]  # fmt: skip
    inputs[2]["data"] = [0.5]  # JSON has no NaN
    for outputs, status in (([{"name": "score"}], 200), ([{"name": "other"}], 400)):
        body = {"inputs": inputs, "outputs": outputs}
        assert ask(both.releases.endpoint(release).http, f"/v2/models/{MODEL}/infer", body).status == status


def test_it_needs_no_separate_process(both: Both) -> None:
    children = {
        backend: _children(both.host.pid(release.name)) for backend, release in both.by_backend.items()
    }
    assert not children["onnx_native"]
    assert children["onnx_python"]


def _children(pid: int | None) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if os.name == "posix" else []


FAR_OF_SPLIT = {**bundles.rows(1), "distance": np.array([[100]], np.int64)}  # the front fails on it


class Served:
    def __init__(self, bundle: Bundle, http: str, grpc: str) -> None:
        self.bundle, self.http, self.grpc = bundle, http, grpc

    def answer(self, columns: dict[str, Array], protocol: Protocol = "http") -> Array | str:
        try:
            return predict(getattr(self, protocol), MODEL, columns, SCHEMA, protocol)["score"]
        except PredictionFailed as refused:
            return f"{refused.fields['status']} {refused.fields['reason']}"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    folder = Path(tempfile.mkdtemp(prefix="serin-e2e-"))
    spec = "serving: {max_batch_rows: 200, queue_delay: 5000us}\n"
    extra = {"front.onnx": bundles.choking_front()}
    bundle = bundles.publish(Store(str(folder / "store")), bias=0.5, spec=spec, in_two=True, extra=extra)
    try:
        with serving_split(bundle, folder, workers=3, piece_rows=16) as place:
            yield Served(bundle, place.endpoint.http, place.endpoint.grpc)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_every_size_of_batch_is_scored_as_the_whole_graph_scores_it(
    served: Served, protocol: Protocol
) -> None:
    for count in (1, 2, 3, 5, 63, 64, 65, 97, 128, 199, 200):
        columns = bundles.rows(count, seed=count)
        found = served.answer(columns, protocol)
        np.testing.assert_allclose(found, bundles.score(served.bundle.path, columns), rtol=0, atol=1e-6)


def test_requests_of_all_sizes_that_share_batches_get_the_scores_that_they_have_alone(served: Served) -> None:
    requests = [bundles.rows(1 + 7 * number % 40, seed=number) for number in range(80)]
    alone = [served.answer(columns) for columns in requests[:20]]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(served.answer, requests))
    for columns, found in zip(requests, together, strict=True):
        np.testing.assert_allclose(found, bundles.score(served.bundle.path, columns), rtol=0, atol=1e-6)
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=False))


def test_a_request_at_fault_does_not_fail_those_that_share_its_batch(served: Served) -> None:
    good = bundles.rows(3)
    own = served.answer(good)
    night = {**bundles.rows(2), "night": np.array([[1], [-2]], np.int8)}
    asked = [FAR_OF_SPLIT, night, *[good] * 10] * 3
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(served.answer, asked))
    for columns, answer in zip(asked, answers, strict=True):
        if columns is good:
            assert np.array_equal(answer, own)
        else:
            assert isinstance(answer, str)
            assert answer.startswith(
                "400 input 'night': row 1 is -2" if columns is night else "500 the model could not"
            )
