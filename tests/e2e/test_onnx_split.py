"""A model in two parts in the native backend, as on a GPU, with the host in the place of the device.

Every size of batch, joined and cut, gives each row the score that it has alone.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from serin.errors import PredictionFailed
from serin.formats.wire import Array
from serin.serving.client.client import Protocol, predict
from serin.serving.native.onnx_backend import NATIVE
from serin.serving.triton.installation import find_triton
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.e2e.split_triton import serving_split
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

pytestmark = pytest.mark.skipif(
    NATIVE not in find_triton().describe(gpus=False).backends,
    reason="Triton was installed without a C++ compiler: run `serin install triton` where there is one",
)
FAR = {**bundles.rows(1), "distance": np.array([[100]], np.int64)}  # the front fails on it


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
    spec = "serving: {max_batch_rows: 200, queue_delay_us: 5000}\n"
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
    asked = [FAR, night, *[good] * 10] * 3
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
