"""Where CUDA's libraries are looked for, and why ONNX Runtime's provider cannot be loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serin.serving.triton.cuda_libraries import cuda_folders, needed_libraries, why_no_cuda

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
    why = why_no_cuda(PYTHON, tmp_path / "libonnxruntime.so.1", [])
    assert "no libonnxruntime_providers_shared.so and no libonnxruntime_providers_cuda.so" in why
    assert "install onnxruntime-gpu" in why


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + bytes(60)])
def test_a_provider_that_is_no_library_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "libonnxruntime_providers_shared.so").touch()
    (tmp_path / "libonnxruntime_providers_cuda.so").write_bytes(content)
    why = why_no_cuda(PYTHON, tmp_path / "libonnxruntime.so.1", [])
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
    assert needed_libraries(tmp_path / "libonnxruntime_providers_cuda.so")[0] == "libcudart_of_a_test.so"
    runtime = tmp_path / "libonnxruntime.so.1"
    assert "libcudart_of_a_test.so: cannot open" in why_no_cuda(PYTHON, runtime, [])
    assert why_no_cuda(PYTHON, runtime, [str(cuda)]) == ""
