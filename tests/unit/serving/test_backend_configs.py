"""Every configuration, for every backend, parses by Triton's own schema and agrees with the bundle's."""

from pathlib import Path

import onnx
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serin.errors import BackendRefused
from serin.export.convert.onnx2trt import PROFILE_ROWS
from serin.formats.schema import read_schema
from serin.serving.triton.backends import PLAN_PROFILE_ROWS, Server
from serin.serving.triton.repository import build_repository
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.unit.serving import bundles
from tests.unit.serving.bundles import CAT, MODEL, NUM

Config = model_config_pb2.ModelConfig
GPU, CPU = model_config_pb2.ModelInstanceGroup.KIND_GPU, model_config_pb2.ModelInstanceGroup.KIND_CPU
TYPES = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT64": "TYPE_INT64", "INT8": "TYPE_INT8"}
WHEEL = Server(accelerators=frozenset({"cuda"}))
WITH_NATIVE = Server(backends=frozenset({"python", "serin_onnx"}))
CONTAINER = Server(
    backends=frozenset({"python", "onnxruntime", "tensorrt", "fil"}), accelerators=frozenset({"cuda"})
)
FRONT, CORE = f"{MODEL}_front", f"{MODEL}_core"
IN_TWO = {MODEL: "", FRONT: "onnxruntime", CORE: "onnxruntime"}
WITH_TRT = {"accelerator": "tensorrt"}
CASES: dict[str, tuple[Server, dict[str, object], int, dict[str, str]]] = {
    "onnx_python": (WHEEL, {}, 0, {MODEL: "python"}),
    "onnx_native": (WITH_NATIVE, {}, 0, {MODEL: "serin_onnx"}),
    "onnx_python on a GPU": (WHEEL, {"backend": "onnx_python"}, 1, {MODEL: "python"}),
    "onnxruntime": (CONTAINER, {"backend": "onnxruntime"}, 0, {MODEL: "onnxruntime"}),
    "onnxruntime, CUDA": (CONTAINER, {"backend": "onnxruntime"}, 2, {MODEL: "onnxruntime"}),
    "onnxruntime, TensorRT": (CONTAINER, {"backend": "onnxruntime", **WITH_TRT}, 1, {MODEL: "onnxruntime"}),
    "ensemble, Python": (WHEEL, {"backend": "ensemble"}, 0, {MODEL: "", FRONT: "python", CORE: "python"}),
    "ensemble, CUDA": (CONTAINER, {"backend": "ensemble"}, 2, IN_TWO),
    "ensemble, TensorRT": (CONTAINER, {"backend": "ensemble", **WITH_TRT}, 1, IN_TWO),
    "tensorrt_plan": (CONTAINER, {"backend": "tensorrt_plan"}, 1, {**IN_TWO, CORE: "tensorrt"}),
    "fil": (CONTAINER, {"backend": "fil"}, 1, {**IN_TWO, CORE: "fil"}),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """With a file of every kind. Engine and trees are not looked into."""
    store = Store(str(tmp_path_factory.mktemp("store")))
    extra = {"model.plan": b"an engine", "trees.ubj": b"trees"}
    return bundles.publish(store, bias=0.0, in_two=True, extra=extra, spec="serving: {max_batch_rows: 128}")


def written(case: str, bundle: Bundle, folder: Path) -> tuple[dict[str, Config], ServingSpec]:
    server, wish, gpus, _ = CASES[case]
    serving = ServingSpec.model_validate(
        {"max_batch_rows": 128, "instances": 2, "queue_delay": "300us", **wish}
    )
    build_repository(
        bundle, folder, server=server, serving=serving, gpus=tuple(range(gpus)), gpu_bytes=1 << 28
    )
    files = sorted(folder.glob("*/config.pbtxt"))
    return {file.parent.name: text_format.Parse(file.read_text(), Config()) for file in files}, serving


@pytest.mark.parametrize("case", CASES)
def test_it_parses_and_its_tensors_are_the_schema_s(case: str, bundle: Bundle, tmp_path: Path) -> None:
    configs, _ = written(case, bundle, tmp_path / "repository")
    assert {name: config.backend for name, config in configs.items()} == CASES[case][3]
    schema = read_schema(Path(bundle.path))
    asked = configs[MODEL]
    for ours, theirs in ((schema.inputs, asked.input), (schema.outputs, asked.output)):
        assert [(tensor.name, TYPES[tensor.dtype], list(tensor.dims)) for tensor in ours] == [
            (tensor.name, model_config_pb2.DataType.Name(tensor.data_type), list(tensor.dims))
            for tensor in theirs
        ]
    for name, config in configs.items():
        assert (config.name, config.max_batch_size) == (name, 128)
        assert list(config.version_policy.specific.versions) == [bundle.version]
        assert config.metric_tags["release"] == f"{MODEL}-v{bundle.version}"
        assert all(size > 0 for tensor in (*config.input, *config.output) for size in tensor.dims)


@pytest.mark.parametrize("case", CASES)
def test_every_file_that_a_configuration_names_is_there(case: str, bundle: Bundle, tmp_path: Path) -> None:
    configs, _ = written(case, bundle, tmp_path / "repository")
    for name, config in configs.items():
        folder = tmp_path / "repository" / name
        inside = folder / str(bundle.version)
        assert inside.is_dir()
        if config.default_model_filename:
            assert (inside / config.default_model_filename).stat().st_size
        if config.backend == "python":
            graphs = config.parameters["graphs"].string_value.split()
            assert {"model.py", "schema.json", *graphs} == {path.name for path in inside.iterdir()}
        if config.backend == "serin_onnx":
            assert {"native.txt", "schema.json", "model.onnx"} == {path.name for path in inside.iterdir()}
        for sample in config.model_warmup:
            assert set(sample.inputs) == {tensor.name for tensor in config.input}
            files = [given.input_data_file for given in sample.inputs.values() if given.input_data_file]
            assert all((folder / "warmup" / file).is_file() for file in files)
    warm = [name for name, config in configs.items() if config.model_warmup]
    assert warm == [name for name in configs if configs[name].platform != "ensemble"]


@pytest.mark.parametrize("case", CASES)
def test_only_the_accelerated_part_is_on_the_gpus_and_nothing_has_a_queue_policy(
    case: str, bundle: Bundle, tmp_path: Path
) -> None:
    configs, serving = written(case, bundle, tmp_path / "repository")
    gpus = CASES[case][2]
    for name, config in configs.items():
        if config.platform == "ensemble":
            assert not config.instance_group
            assert not config.HasField("dynamic_batching")
            continue
        on_gpu = gpus and name != FRONT
        (group,) = config.instance_group
        assert (group.kind, list(group.gpus)) == ((GPU, list(range(gpus))) if on_gpu else (CPU, []))
        assert group.count == serving.instances
        assert config.dynamic_batching.max_queue_delay_microseconds == 300
        assert not config.dynamic_batching.HasField("default_queue_policy")


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][3][MODEL] == ""])
def test_an_ensemble_leads_every_column_to_the_answer(case: str, bundle: Bundle, tmp_path: Path) -> None:
    configs, _ = written(case, bundle, tmp_path / "repository")
    asked = configs[MODEL]
    known = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in asked.input}
    for step in asked.ensemble_scheduling.step:
        inner = configs[step.model_name]
        assert step.model_version == bundle.version
        assert set(step.input_map) == {tensor.name for tensor in inner.input}
        assert set(step.output_map) == {tensor.name for tensor in inner.output}
        for tensor in inner.input:
            assert known[step.input_map[tensor.name]] == (tensor.data_type, list(tensor.dims))
        for tensor in inner.output:
            known[step.output_map[tensor.name]] = (tensor.data_type, list(tensor.dims))
    for tensor in asked.output:
        assert known[tensor.name] == (tensor.data_type, list(tensor.dims))


def test_onnx_runtime_s_accelerators_get_their_limits(bundle: Bundle, tmp_path: Path) -> None:
    def options(case: str, model: str) -> tuple[str, dict[str, str]]:
        configs, _ = written(case, bundle, tmp_path / case)
        (found,) = configs[model].optimization.execution_accelerators.gpu_execution_accelerator
        return found.name, dict(found.parameters)

    assert options("ensemble, CUDA", CORE) == ("cuda", {"gpu_mem_limit": str(1 << 28)})
    name, asked = options("ensemble, TensorRT", CORE)
    assert name == "tensorrt"
    assert asked["trt_profile_max_shapes"] == f"{NUM}:128x3,{CAT}:128x1"
    assert asked["precision_mode"] == "FP32", "precision comes from the graph that was judged"
    assert asked["trt_engine_cache_path"] == str(tmp_path / "engines")
    _, whole = options("onnxruntime, TensorRT", MODEL)
    assert "trt_profile_max_shapes" not in whole, "texts are not TensorRT's"


def test_an_engine_is_given_all_of_its_profiles(bundle: Bundle, tmp_path: Path) -> None:
    assert PLAN_PROFILE_ROWS == PROFILE_ROWS, "as it was built"
    configs, _ = written("tensorrt_plan", bundle, tmp_path / "repository")
    assert list(configs[CORE].instance_group[0].profile) == ["0", "1", "2", "3"]


def test_an_engine_serves_no_batch_beyond_those_it_was_built_for(bundle: Bundle, tmp_path: Path) -> None:
    serving = ServingSpec(backend="tensorrt_plan", max_batch_rows=129)
    with pytest.raises(BackendRefused, match="max_batch_rows=129 is beyond the 128 rows"):
        build_repository(bundle, tmp_path / "repository", server=CONTAINER, serving=serving, gpus=(0,))
    assert list(tmp_path.iterdir()) == []


def test_graphs_take_and_give_what_their_configurations_say(bundle: Bundle, tmp_path: Path) -> None:
    for case in ("ensemble, CUDA", "fil"):
        configs, _ = written(case, bundle, tmp_path / case)
        for name, config in configs.items():
            file = tmp_path / case / name / str(bundle.version) / "model.onnx"
            if not file.is_file():
                continue
            graph = onnx.load_model(file)
            onnx.checker.check_model(graph)
            assert {tensor.name for tensor in graph.graph.input} == {tensor.name for tensor in config.input}
            assert {tensor.name for tensor in graph.graph.output} == {tensor.name for tensor in config.output}
