"""The native backend on a GPU beside the Python one, each in a real Triton.

The same scores and refusals for every size of batch, joined or alone; and its memory is returned. Skipped, with the
reason, where there is no GPU or no such backend.

    python -m pytest tests/gpu/test_native_cuda.py -q -s
"""

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.serving.gpu_servers import Running, Wanted, flights_bundle, serving
from serin.errors import PredictionFailed
from serin.formats.schema import read_schema
from serin.formats.wire import Array, to_wire
from serin.machine.hardware import Nvml, inventory
from serin.machine.ports import free_ports
from serin.serving.client.client import Protocol, predict
from serin.serving.native.onnx_backend import NATIVE
from serin.serving.triton.installation import find_triton
from serin.serving.triton.process import new_place, triton_process
from serin.serving.triton.repository import build_repository, choose_for, serving_settings
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Bundle, Release
from tests.e2e.serving_host import ChildHost, is_ready, wait_for
from tests.gpu.parts import why_no_release
from tests.kit.web import ask
from tests.unit.export.small_dataset import flights

TOLERANCE = 1e-4  # both use TF32; other sizes of batch choose other kernels
LOADS = 20
MB = 1 << 20


_WHY = why_no_release(NATIVE)
pytestmark = [pytest.mark.skipif(bool(_WHY), reason=_WHY), pytest.mark.timeout(300)]


class Both:
    def __init__(self, bundle: Bundle, servers: dict[str, Running], folder: Path) -> None:
        self.bundle, self.servers, self.folder = bundle, servers, folder
        self.schema = read_schema(Path(bundle.path))

    def rows(self, count: int) -> dict[str, Array]:
        return to_wire(flights(count), self.schema)

    def answer(self, name: str, columns: dict[str, Array], protocol: Protocol = "http") -> Array | str:
        address = getattr(self.servers[name].place.endpoint, protocol)
        size = max(len(next(iter(columns.values()))), 1)
        try:
            return predict(address, self.bundle.model, columns, self.schema, protocol, batch_rows=size)[
                "score"
            ]
        except PredictionFailed as refused:
            return f"{refused.fields['status']} {refused.fields['reason']}"

    def log(self) -> str:
        return (self.folder / "native" / "log.txt").read_text()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return flights_bundle(None, tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def both(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("gpu")
    wanted = [
        Wanted(name=name, serving={"backend": f"onnx_{name}", "device": "gpu"}, split={})
        for name in ("native", "python")
    ]
    with serving(bundle, folder / "servers", wanted) as servers:
        yield Both(bundle, servers, folder / "servers")


def test_a_release_for_a_gpu_is_served_by_it_by_default(both: Both) -> None:
    server = find_triton().describe(gpus=True)
    choice = choose_for(both.bundle, server=server, serving=serving_settings(both.bundle), gpus=1)
    assert (choice.backend, choice.place) == ("onnx_native", "gpu"), choice.reason


def test_every_size_has_its_cuda_graph(both: Both) -> None:
    assert "without CUDA graphs" not in both.log()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_every_size_of_batch_gets_the_python_backend_s_scores(both: Both, protocol: Protocol) -> None:
    worst = 0.0
    for count in (1, 2, 3, 8, 31, 64, 65, 96, 97, 250, 512, 513, 1000, 2049, 4095, 4096):
        columns = both.rows(count)
        native, python = (both.answer(name, columns, protocol) for name in ("native", "python"))
        assert not isinstance(native, str), native
        assert not isinstance(python, str), python
        worst = max(worst, float(np.abs(native - python).max()))
    print(f"at most {worst:.2g} apart over {protocol}")
    assert worst <= TOLERANCE


def test_awkward_values_get_the_python_backend_s_scores_and_refusals(both: Both) -> None:
    five, one = both.rows(5), both.rows(1)
    words = np.array(["", "a\0b", "Zürich 雪", "\U0001f600", "CÜ"], dtype=object).reshape(-1, 1)
    edges = np.array([np.nan, np.inf, -np.inf, 1e38, -0.0], np.float32).reshape(-1, 1)
    nulls = {
        name: np.repeat(
            to_wire(flights(400).slice(at, 1), both.schema)[name], 5, axis=0
        )
        for name in five
        for at in [next(row for row in range(400) if flights(400).column(name)[row].as_py() is None)]
    }  # fmt: skip
    asked = {
        "strings": {**five, "carrier": words, "tailnum": words},
        "edges": {**five, "distance": edges, "num": edges},
        "nulls": nulls,
        "long": {**one, "carrier": np.array([["x" * 70_000]], dtype=object)},
        "not UTF-8": {**one, "carrier": np.array([[b"\xff"]], dtype=object)},
        "no bool": {**one, "night": np.array([[5]], np.int8)},
        "no rows": {name: values[:0] for name, values in five.items()},
    }
    for what, columns in asked.items():
        native, python = (both.answer(name, columns) for name in ("native", "python"))
        if isinstance(python, str):
            assert native == python, what
        else:
            np.testing.assert_allclose(native, python, atol=TOLERANCE, err_msg=what)


def test_requests_that_share_a_batch_get_the_scores_that_they_have_alone(both: Both) -> None:
    rows = both.rows(4000)
    sizes = [1 + 37 * number % 90 for number in range(80)]
    starts = np.cumsum([0, *sizes])
    requests = [
        {name: values[start : start + size] for name, values in rows.items()}
        for start, size in zip(starts, sizes, strict=False)
    ]
    alone = [both.answer("native", columns) for columns in requests]
    before = both.servers["native"].counters()
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda columns: both.answer("native", columns), requests * 4))
    after = both.servers["native"].counters()
    joined = (after["requests"] - before["requests"]) / (after["batches"] - before["batches"])
    print(f"{joined:.1f} requests in a batch")
    assert joined > 1
    for one, other in zip(alone * 4, together, strict=True):
        np.testing.assert_allclose(other, one, atol=TOLERANCE)


@pytest.mark.alone
def test_memory_is_returned_after_each_of_20_loads(bundle: Bundle, tmp_path: Path) -> None:
    nvml = Nvml.open()
    assert nvml is not None
    gc.collect()  # the export's own sessions
    torch.cuda.empty_cache()
    install, device, schema = find_triton(), inventory()[0].id, read_schema(Path(bundle.path))
    wish = ServingSpec.model_validate({"backend": "onnx_native", "device": "gpu", "max_batch_rows": 4096})
    server = install.describe(gpus=True)
    repository = build_repository(bundle, tmp_path / "repository", server=server, serving=wish, gpus=(0,))
    http_port, grpc_port, metrics_port = free_ports(3)
    release = Release(model=bundle.model, version=bundle.version)
    place = new_place(release, (http_port, grpc_port, metrics_port))
    process = triton_process(install, release, repository, place, tmp_path / "log.txt", [device])
    command = [
        word.replace("--model-control-mode=none", "--model-control-mode=explicit")
        for word in process.command
        if "restricted" not in word
    ]
    host, free, columns = ChildHost(), [], to_wire(flights(64), schema)
    before = nvml.free_bytes(device) or 0
    try:
        host.start(replace(process, name="loads", command=tuple(command)))
        wait_for("Triton", lambda: is_ready(place.endpoint.http), host, "loads")
        for _ in range(LOADS):
            _post(place.endpoint.http, f"/v2/repository/models/{bundle.model}/load")
            predict(place.endpoint.http, bundle.model, columns, schema)
            _post(place.endpoint.http, f"/v2/repository/models/{bundle.model}/unload")
            wait_for("unloading", lambda: not _is_loaded(place.endpoint.http, bundle.model), host, "loads")
            free.append(nvml.free_bytes(device) or 0)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{(tmp_path / 'log.txt').read_text()[-3000:]}") from error
    finally:
        host.stop_all()
    time.sleep(0.5)  # the driver frees a process's memory shortly after its end
    left = before - (nvml.free_bytes(device) or 0)
    print(
        f"free after each unload, in MB: {[each // MB for each in free]}; {left // MB} MB not returned at the end"
    )
    assert min(free[5:]) >= free[4] - 16 * MB, "memory is lost with each load"
    assert left < 16 * MB


def _post(url: str, path: str) -> None:
    answer = ask(url, path, "{}", timeout_s=120.0)
    assert answer.status == 200, answer.text


def _is_loaded(url: str, model: str) -> bool:
    text = ask(url, "/v2/repository/index", "{}").text
    return f'"name":"{model}"' in text and "UNAVAILABLE" not in text
