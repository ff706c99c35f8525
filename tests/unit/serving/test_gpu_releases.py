"""Releases on GPUs: memory is theirs before anything is loaded, and what does not fit is refused."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serin.errors import BackendRefused, FileBroken, GpuMemoryShort
from serin.export.take_over import import_repository
from serin.formats.schema import NULL_OF_KIND, InputColumn, OutputTensor, Schema, write_schema
from serin.machine.hardware import Device
from serin.machine.leases import lease
from serin.serving.triton.backends import Choice
from serin.serving.triton.gpu_memory import CONTEXT_BYTES, MB, bytes_per_row, estimate_need
from serin.serving.triton.process import new_place, triton_process
from serin.serving.triton.release_record import reserved_bytes
from serin.serving.triton.releases import Releases
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL
from tests.unit.serving.test_releases import INSTALL, FakeHost

V1, V2 = (Release(model=MODEL, version=version) for version in (1, 2))
SMALL = Device(id="GPU-small", name="a GPU", memory_bytes=2500 * MB)
LARGE = Device(id="GPU-large", name="a GPU", memory_bytes=4000 * MB)


class Machine:
    """A Triton of the wheel's kind whose Python says that it has CUDA, and the GPUs that the test gives it."""

    def __init__(
        self, folder: Path, *, providers: str = "CUDAExecutionProvider CPUExecutionProvider"
    ) -> None:
        self.folder, self.store, self.host = folder, Store(str(folder / "store")), FakeHost()
        (folder / "backends" / "python").mkdir(parents=True)
        python = folder / "bin" / "python3"
        python.parent.mkdir()
        python.write_text(f"#!/bin/sh\necho {providers}\n")
        python.chmod(0o755)
        self.install = replace(INSTALL, backends=folder / "backends", python_folder=python.parent)

    def releases(self, *devices: Device) -> Releases:
        return Releases(
            self.folder / "releases", host=self.host, store=self.store, install=self.install,
            devices=lambda: devices,
        )  # fmt: skip

    def publish(self, spec: str = "serving: {}") -> Bundle:
        return bundles.publish(self.store, bias=0.0, in_two=True, spec=spec)

    def config(self, release: Release) -> model_config_pb2.ModelConfig:
        folder = self.folder / "releases" / release.name / "repository" / release.model
        return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    inventory = {"format": "serin.inventory", "version": 1, "devices": [{"id": SMALL.id}, {"id": LARGE.id}]}
    (tmp_path / "inventory.json").write_text(json.dumps(inventory))
    monkeypatch.setenv("SERIN_INVENTORY", str(tmp_path / "inventory.json"))
    return Machine(tmp_path)


def test_a_release_for_a_gpu_gets_the_one_with_most_room_and_sees_no_other(machine: Machine) -> None:
    machine.publish()
    releases = machine.releases(SMALL, LARGE)
    releases.start(V1)
    assert machine.host.processes[V1.name].environment["CUDA_VISIBLE_DEVICES"] == LARGE.id
    config = machine.config(V1)
    (group,) = config.instance_group
    assert (group.kind, list(group.gpus)) == (model_config_pb2.ModelInstanceGroup.KIND_GPU, [0])
    assert config.parameters["graphs"].string_value == "front.onnx core.onnx"
    assert config.parameters["provider"].string_value == "cuda"
    served = releases.served(V1)
    assert int(config.parameters["gpu_mem_limit"].string_value) == served.arena_bytes
    assert reserved_bytes(machine.folder / "releases") == {LARGE.id: {V1.name: served.bytes}}
    assert f"{V1.name} is served as onnx_python on {LARGE.id}" in releases.log(V1).read_text()


def test_a_release_on_a_gpu_finds_cuda_where_it_is_installed_after_triton_s_own_libraries(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = machine.folder / "lib" / "python3.11" / "site-packages" / "nvidia" / "cudnn" / "lib"
    beside.mkdir(parents=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/lib64:")
    place = new_place(V1, (1, 2, 3))
    on_gpu, on_cpu = (
        triton_process(
            machine.install, V1, machine.folder, place, machine.folder / "log", devices
        ).environment["LD_LIBRARY_PATH"].split(":")
        for devices in ((LARGE.id,), ())
    )  # fmt: skip
    assert on_cpu == ["/t/lib", "/p/lib"]
    assert on_gpu[:3] == ["/t/lib", "/p/lib", str(beside)]
    assert on_gpu[-1] == "/usr/local/cuda/lib64"


def test_what_does_not_fit_beside_another_is_refused_and_leaves_nothing(machine: Machine) -> None:
    machine.publish()
    machine.publish()
    releases = machine.releases(SMALL)
    releases.start(V1)
    with pytest.raises(
        GpuMemoryShort, match=rf"{V2.name} needs 1,656 MB .*{V1.name} has 1,656.*serving.device: cpu"
    ):
        releases.start(V2)
    assert list(machine.host.processes) == [V1.name]
    assert not (machine.folder / "releases" / V2.name).exists()
    releases.stop(V1)
    releases.start(V2)
    assert machine.host.processes[V2.name].environment["CUDA_VISIBLE_DEVICES"] == SMALL.id


def test_a_training_has_all_of_its_gpu_but_what_is_kept_for_serving(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", LARGE.id)
    machine.publish()
    releases = machine.releases(LARGE)
    training = partial(lease, 1, home=machine.folder, purpose="training of delays")
    with training(), pytest.raises(GpuMemoryShort, match=r"leased by .*training of delays"):
        releases.start(V1)
    monkeypatch.setenv("SERIN_SERVING_MEMORY", "1700000000")
    with training(), pytest.raises(GpuMemoryShort):
        releases.start(V1)  # 1,621 MB are kept, 1,656 are needed
    monkeypatch.setenv("SERIN_SERVING_MEMORY", "1800000000")
    with training():
        releases.start(V1)


def test_a_release_over_two_gpus_reserves_on_both(machine: Machine) -> None:
    machine.publish("serving: {gpus: 2, instances: 2}\n")
    releases = machine.releases(LARGE, replace(LARGE, id="GPU-other"))
    releases.start(V1)
    served = releases.served(V1)
    assert served.bytes == 3 * CONTEXT_BYTES + 2 * 256 * MB, "instances of the Python backend are processes"
    assert set(reserved_bytes(machine.folder / "releases")) == {LARGE.id, "GPU-other"}
    assert [(list(group.gpus), group.count) for group in machine.config(V1).instance_group] == [([0, 1], 2)]


@pytest.mark.parametrize(
    ("spec", "devices", "words"),
    [
        ("serving: {device: gpu}", (), r"serving.device: gpu: this machine has 0 GPU\(s\)"),
        ("serving: {gpus: 2}", (LARGE,), r"serving.gpus: 2: this machine has 1 GPU\(s\)"),
        ("serving: {backend: fil}", (LARGE,), r"serving.backend: fil: the bundle has no trees.ubj"),
        ("serving: {backend: onnxruntime}", (LARGE,), "no onnxruntime backend; it has python"),
        (
            "serving: {device: gpu, accelerator: tensorrt}",
            (LARGE,),
            "ONNX Runtime of its Python has no provider for tensorrt",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_words_and_nothing_is_started(
    machine: Machine, spec: str, devices: tuple[Device, ...], words: str
) -> None:
    machine.publish(spec)
    with pytest.raises(BackendRefused, match=words):
        machine.releases(*devices).start(V1)
    assert machine.host.processes == {}
    assert not (machine.folder / "releases" / V1.name).exists()


def test_without_a_provider_in_triton_s_python_the_cpu_serves_and_the_log_says_why(tmp_path: Path) -> None:
    machine = Machine(tmp_path, providers="CPUExecutionProvider")
    machine.publish()
    releases = machine.releases(LARGE)
    releases.start(V1)
    assert machine.host.processes[V1.name].environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "on the CPU: no GPU (" in releases.log(V1).read_text()
    assert machine.config(V1).parameters["graphs"].string_value == "model.onnx"


def test_a_record_of_another_version_is_refused_with_advice(machine: Machine) -> None:
    machine.publish("serving: {device: cpu}")
    releases = machine.releases()
    releases.start(V1)
    path = machine.folder / "releases" / V1.name / "release.json"
    record = json.loads(path.read_text())
    record |= {"version": 1, "served": {"shape": "onnx_python"}}
    path.write_text(json.dumps(record))
    with pytest.raises(FileBroken, match=r"not a serin\.release document of version 2\); move it away"):
        releases.served(V1)


def own_repository(folder: Path, store: Store, config: str) -> Bundle:
    """A team's model as it is; nobody here looks into its file."""
    (folder / "theirs" / "1").mkdir(parents=True)
    (folder / "theirs" / "1" / "weights").write_bytes(bytes(1000))
    tensors = (
        'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    (folder / "theirs" / "config.pbtxt").write_text(f"max_batch_size: 8 {tensors} {config}")
    column = InputColumn(name="x", dtype="FP32", kind="float", null=NULL_OF_KIND["float"])
    outputs = (OutputTensor(name="y", dtype="FP32", dims=(1,)),)
    write_schema(folder, Schema(task="regression", inputs=(column,), outputs=outputs))
    rows = np.arange(3, dtype=np.float32)
    pq.write_table(pa.table({"x": rows, "y": rows, "row": np.arange(3)}), folder / "golden.parquet")
    return import_repository(folder, store, name=MODEL)


def test_a_team_s_own_repository_that_asks_for_a_gpu_reserves_its_memory(machine: Machine) -> None:
    own_repository(
        machine.folder / "own", machine.store, 'backend: "python" instance_group { kind: KIND_GPU }'
    )
    with pytest.raises(
        BackendRefused, match=r"its model 'theirs': it needs a GPU \(KIND_GPU\), but there is none here"
    ):
        machine.releases().start(V1)
    releases = machine.releases(SMALL)
    releases.start(V1)
    assert reserved_bytes(machine.folder / "releases") == {SMALL.id: {V1.name: CONTEXT_BYTES + 256 * MB}}
    assert machine.host.processes[V1.name].environment["CUDA_VISIBLE_DEVICES"] == SMALL.id


def test_a_team_s_own_repository_for_another_backend_is_refused(machine: Machine) -> None:
    own_repository(machine.folder / "own", machine.store, 'platform: "pytorch_libtorch"')
    with pytest.raises(
        BackendRefused, match="its model 'theirs': the server has no pytorch backend; it has python"
    ):
        machine.releases(LARGE).start(V1)
    assert machine.host.processes == {}


def test_the_need_grows_with_the_graph_the_batch_and_the_instances(tmp_path: Path) -> None:
    for name, graph in (("model.onnx", bundles.graph(0.0)), ("core.onnx", bundles.core(0.0))):
        onnx.save(graph, tmp_path / name)
    choice = Choice(backend="onnx_python", place="gpu", reason="")
    row = bytes_per_row(bundles.core(0.0))
    assert row == 3 * 4 + 8 + 4 * 4, "three numbers and a code; the code, the sum, the logit and the score"
    small = estimate_need(tmp_path, choice, ServingSpec())
    assert small.total_bytes == 2 * CONTEXT_BYTES + 256 * MB, "Triton itself, and the process of its model"
    large = estimate_need(tmp_path, choice, ServingSpec(max_batch_rows=10_000_000))
    weights = (tmp_path / "core.onnx").stat().st_size
    assert large.arena_bytes == 2 * (10_000_000 * row + weights)
    three = estimate_need(tmp_path, choice, ServingSpec(instances=3))
    assert three.total_bytes == 4 * CONTEXT_BYTES + 3 * 256 * MB
    named = estimate_need(tmp_path, choice, ServingSpec(gpu_memory=2000 * 2**20))
    assert (named.total_bytes, named.arena_bytes) == (2000 * MB, 2000 * MB - 2 * CONTEXT_BYTES)
    native = Choice(backend="onnx_native", place="gpu", reason="")
    two = estimate_need(tmp_path, native, ServingSpec(instances=2))
    assert two.total_bytes == CONTEXT_BYTES + 2 * (256 + 128) * MB, "one process, whatever its instances"
    named = estimate_need(tmp_path, native, ServingSpec(gpu_memory=2000 * 2**20))
    assert named.arena_bytes == 2000 * MB - CONTEXT_BYTES - 128 * MB
