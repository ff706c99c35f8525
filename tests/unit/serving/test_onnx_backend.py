"""The backends for ONNX and trees: when they are offered, their settings, and where CUDA's libraries are looked for."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xgboost
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serin.errors import TritonInstallFailed
from serin.formats.bundle import read_golden, verify_bundle
from serin.formats.schema import NULL_OF_KIND, InputColumn, OutputTensor, Schema
from serin.formats.shards import read_split
from serin.formats.trained import write_trained
from serin.models.trees import column_types, joined
from serin.scoring.session import open_session
from serin.serving.native import compiler, onnx_backend
from serin.serving.native.compiler import Compiler, obtain_compiler
from serin.serving.native.onnx_backend import NATIVE
from serin.serving.triton.backends import Server
from serin.serving.triton.installation import TritonInstall, cuda_folders, why_no_cuda
from serin.serving.triton.repository import build_repository
from tests.unit.export.small_dataset import Trained, make_trained

NAME = "a b\n雪"  # a column may be called anything


def test_it_has_one_name() -> None:
    assert f'backend: "{NATIVE}"' in (onnx_backend.SOURCES / "config.pbtxt").read_text()


def test_its_settings_have_every_column_by_kind_sizes_and_name() -> None:
    schema = Schema(
        task="binary",
        inputs=(
            InputColumn(name=NAME, dtype="BYTES", kind="string", null=NULL_OF_KIND["string"]),
            InputColumn(name="n", dtype="FP32", kind="float", null=NULL_OF_KIND["float"], dims=(2, 3)),
        ),
        outputs=(OutputTensor(name="score", dtype="FP32", dims=(1,)),),
    )
    lines = onnx_backend.native_settings(schema, threads=2, max_string_bytes=99).decode().splitlines()
    assert lines == [
        "threads 2",
        "max_string_bytes 99",
        f"input string 1 {_hex(NAME)}",
        f"input float 2,3 {_hex('n')}",
        f"output {_hex('score')}",
    ]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
        (65, [1, 2, 4, 8, 16, 32, 64, 65]),
        (200, [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 200]),
    ],
)
def test_batches_of_a_core_have_few_sizes_the_largest_among_them(most: int, sizes: list[int]) -> None:
    assert onnx_backend.batch_sizes(most) == sizes


def test_no_batch_of_a_core_grows_by_much() -> None:
    sizes = onnx_backend.batch_sizes(4096)
    assert sizes == sorted(set(sizes))
    for rows in range(1, 4097):
        size = next(size for size in sizes if size >= rows)
        assert size < 2 * rows
        assert size <= 1.5 * rows + 1 or rows < 64


def test_the_settings_of_a_split_model_have_its_sizes_and_the_tensors_of_both_sides() -> None:
    schema = Schema(
        task="binary",
        inputs=(InputColumn(name="n", dtype="FP32", kind="float", null=NULL_OF_KIND["float"]),),
        outputs=(OutputTensor(name="score", dtype="FP32", dims=(1,)),),
    )
    inner = (OutputTensor(name=NAME, dtype="INT64", dims=(6,)),)
    split = onnx_backend.Split(inner=inner, max_rows=3, workers=4, arena_bytes=99)
    lines = onnx_backend.native_settings(schema, threads=1, max_string_bytes=9, split=split).decode()
    assert lines.splitlines()[-3:] == [
        "split cuda 99 1 4 256 1,2,3",
        f"inner int 6 {_hex(NAME)}",
        f"outer float 1 {_hex('score')}",
    ]


def test_a_core_has_no_outputs_of_strings() -> None:
    word = OutputTensor(name="word", dtype="BYTES", dims=(1,))
    assert onnx_backend.unsupported_output([word]) == "word"
    assert onnx_backend.unsupported_output([OutputTensor(name="score", dtype="FP32", dims=(1,))]) is None


def _hex(name: str) -> str:
    return name.encode().hex()


def test_the_machines_compiler_comes_first_then_that_of_ziglang_and_a_failure_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "lib" / "python3.11" / "site-packages" / "ziglang" / "zig"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(
        TritonInstallFailed, match=r"no C\+\+ compiler is on PATH, and ziglang.* cannot be installed"
    ):
        obtain_compiler(tmp_path)  # there is no pip either
    program.parent.mkdir(parents=True)
    program.touch()
    zig = obtain_compiler(tmp_path)
    assert zig.command[:2] == (str(program), "c++")
    assert zig.variables()["ZIG_GLOBAL_CACHE_DIR"] == str(tmp_path / "zig-cache")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "g++").touch(mode=0o755)
    assert obtain_compiler(tmp_path).command == (str(tmp_path / "bin" / "g++"),)


def test_a_source_that_cannot_be_compiled_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime.so.1").touch()
    with pytest.raises(TritonInstallFailed, match="compiling the ONNX backend"):
        onnx_backend.build(Compiler(("false",)), tmp_path / "backends", tmp_path)
    assert list((tmp_path / "backends").iterdir()) == []


def test_one_that_was_built_from_other_sources_is_not_offered(tmp_path: Path) -> None:
    folder = tmp_path / "backends" / NATIVE
    folder.mkdir(parents=True)
    (tmp_path / "backends" / "python").mkdir()
    (folder / onnx_backend.LIBRARY).write_bytes(b"")
    (folder / "sources").write_text("those of last year")
    install = TritonInstall(
        server=tmp_path, backends=tmp_path / "backends", python_folder=tmp_path, libraries=()
    )
    assert install.describe(gpus=False).backends == {"python"}


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler is here")
def test_it_compiles_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / "onnxruntime"
    (runtime / "capi").mkdir(parents=True)
    (runtime / "capi" / "libonnxruntime.so.1.2.3").write_bytes(b"")
    with monkeypatch.context() as strict:
        strict.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-Wall", "-Wextra", "-Werror"))
        onnx_backend.build(Compiler(("c++",)), tmp_path / "backends", runtime)
        assert onnx_backend.is_built(tmp_path / "backends")
    assert not onnx_backend.is_built(tmp_path / "backends"), "it was made with other flags than ours"


def test_one_whose_onnx_runtime_is_gone_is_not_offered(tmp_path: Path) -> None:
    folder = tmp_path / NATIVE
    folder.mkdir()
    for name in (onnx_backend.LIBRARY, "libonnxruntime.so.1"):
        (folder / name).write_bytes(b"")
    (folder / "sources").write_text(onnx_backend._mark())
    (folder / "libonnxruntime.so").symlink_to(folder / "libonnxruntime.so.1")
    assert onnx_backend.is_built(tmp_path)
    (folder / "libonnxruntime.so.1").unlink()
    assert not onnx_backend.is_built(tmp_path)


SERVER = Server(backends=frozenset({"fil", "onnxruntime"}))


def with_trees(folder: Path) -> Trained:
    """The small dataset's training, had it been XGBoost's."""
    trained = make_trained(folder, "binary", export={"target": "gpu"})
    shape = json.loads((folder / "result" / "model.json").read_text())["shape"]
    rows = read_split(folder / "dataset", "train")
    num, cat, target = (np.concatenate(list(part)) for part in (rows.num, rows.cat, rows.target))
    table = xgboost.DMatrix(
        joined(num, cat), target, feature_types=column_types(shape["numeric"], shape["sizes"]),
        enable_categorical=True,
    )  # fmt: skip
    booster = xgboost.train({"objective": "binary:logistic", "nthread": 1}, table, 5)
    result = folder / "trees"
    result.mkdir()
    record = {"model": {"kind": "xgboost"}, "shape": shape, "task": "binary", "file": "trees.ubj"}
    write_trained(result, bytes(booster.save_raw("ubj")), record)
    checkpoint = replace(trained.checkpoint, path=str(result))
    return replace(trained, checkpoint=checkpoint)


def test_an_exported_forest_is_served_by_fil_from_rows_that_xgboost_scores_as_the_gate_did(
    tmp_path: Path,
) -> None:
    trained = with_trees(tmp_path)
    bundle = trained.export(tmp_path)
    assert "trees.ubj" in verify_bundle(Path(bundle.path)).files

    serving = trained.spec.serving.model_copy(update={"backend": "fil"})
    folder = build_repository(bundle, tmp_path / "repository", server=SERVER, serving=serving)

    core = folder / f"{bundle.model}_core"
    config = text_format.Parse((core / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    front = open_session(folder / f"{bundle.model}_front" / str(bundle.version) / "model.onnx")
    golden = read_golden(Path(bundle.path))
    (rows,) = front.run([front.get_outputs()[0].name], golden.inputs)
    assert list(config.input[0].dims) == [rows.shape[1]]
    booster = xgboost.Booster(model_file=str(core / str(bundle.version) / config.default_model_filename))
    table = xgboost.DMatrix(rows, feature_types=booster.feature_types, enable_categorical=True)
    scores = booster.predict(table).reshape(-1, 1)
    print("largest difference from the golden scores", np.abs(scores - golden.outputs["score"]).max())
    np.testing.assert_allclose(scores, golden.outputs["score"], rtol=1e-5, atol=1e-6)


PYTHON = Path(sys.executable).parent


def test_packages_beside_triton_come_first_then_those_that_python_finds_then_the_user_s_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "triton" / "lib" / "python3.11" / "site-packages" / "nvidia" / "cudnn" / "lib"
    elsewhere = tmp_path / "elsewhere" / "nvidia" / "cu13" / "lib"
    for folder in (beside, elsewhere):
        folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))  # as a .pth file adds it
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/own::{beside}")
    found = cuda_folders(tmp_path / "triton")
    assert found[0] == str(beside)
    assert found.index(str(elsewhere)) < found.index("/own")
    assert len(found) == len(set(found))


def test_a_runtime_without_the_provider_says_so(tmp_path: Path) -> None:
    why = why_no_cuda(tmp_path / "libonnxruntime.so.1", [])
    assert "no libonnxruntime_providers_shared.so and no libonnxruntime_providers_cuda.so" in why
    assert "install onnxruntime-gpu" in why


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + bytes(60)])
def test_a_provider_that_is_no_library_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "libonnxruntime_providers_shared.so").touch()
    (tmp_path / "libonnxruntime_providers_cuda.so").write_bytes(content)
    why = why_no_cuda(tmp_path / "libonnxruntime.so.1", [])
    assert why.startswith("libonnxruntime_providers_cuda.so cannot be read")


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_provider_whose_libraries_are_missing_names_the_first_and_loads_when_it_is_found(
    tmp_path: Path,
) -> None:
    cuda = tmp_path / "cuda"
    cuda.mkdir()
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    build = ["cc", "-shared", "-fPIC", "-DPROVIDER=0", str(source), "-o"]
    subprocess.run([*build, str(cuda / "libcudart_of_a_test.so")], check=True)
    subprocess.run([*build, str(tmp_path / "libonnxruntime_providers_shared.so")], check=True)
    needs = [f"-L{cuda}", "-Wl,--no-as-needed", "-lcudart_of_a_test"]
    provider = [word.replace("PROVIDER=0", "PROVIDER=1") for word in build]
    subprocess.run([*provider, str(tmp_path / "libonnxruntime_providers_cuda.so"), *needs], check=True)
    runtime = tmp_path / "libonnxruntime.so.1"
    assert "libcudart_of_a_test.so => not found" in why_no_cuda(runtime, [])
    assert why_no_cuda(runtime, [str(cuda)]) == ""
