"""CUDA's libraries for a release on a GPU: where they are, and whether ONNX Runtime's provider finds those it needs.

They come from packages (`nvidia-*`) beside Triton's ONNX Runtime or beside this process's, so that nobody has to set
LD_LIBRARY_PATH; where it is set, its folders come after these.
"""

from __future__ import annotations

import importlib.util
import mmap
import struct
import subprocess
import sys
from pathlib import Path

from serin.machine import environment

_PROVIDERS = ("libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so")
_TRY = "import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]"
_TRY_S = 60
_LOAD, _DYNAMIC = 1, 2  # segments of an ELF file
_NEEDED, _STRINGS = 1, 5  # entries of the dynamic one


def cuda_folders(environment_folder: Path) -> list[str]:
    """Returns the folders of CUDA's libraries for processes of the Python environment `environment_folder`."""
    folders = [environment_folder, Path(sys.prefix)]
    found = [path for folder in folders for path in folder.glob("lib/python3.*/site-packages/nvidia/*/lib")]
    spec = importlib.util.find_spec("nvidia")  # also in folders that a .pth file names
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found += sorted(Path(place).glob("*/lib"))
    inherited = environment.child_environment().get("LD_LIBRARY_PATH", "")
    return list(dict.fromkeys([*map(str, found), *(path for path in inherited.split(":") if path)]))


def why_no_cuda(python_folder: Path, runtime: Path, library_path: list[str]) -> str:
    """Returns why the CUDA provider beside the ONNX Runtime `runtime` cannot be loaded; empty when it can.

    Triton's Python loads the libraries that the provider needs, the driver's among them, in a process with the
    release's library path. The provider itself crashes a process that is not ONNX Runtime's.
    """
    paths = [runtime.with_name(name) for name in _PROVIDERS]
    if missing := [path.name for path in paths if not path.is_file()]:
        return f"its ONNX Runtime has no {' and no '.join(missing)}; install onnxruntime-gpu"
    try:
        needed = needed_libraries(paths[-1])
    except (OSError, ValueError, struct.error, StopIteration) as error:
        return f"{paths[-1].name} cannot be read: {type(error).__name__}: {error}"
    variables = environment.child_environment(
        LD_LIBRARY_PATH=":".join(library_path) or None, PYTHONPATH=None, PYTHONHOME=None, VIRTUAL_ENV=None
    )
    try:
        done = subprocess.run(
            [str(python_folder / "python3"), "-c", _TRY, *needed],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_TRY_S,
            env=variables,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"CUDA's libraries cannot be tried: {error}"
    last = " ".join(done.stderr.strip().splitlines()[-1:])
    return (
        "" if done.returncode == 0 else f"CUDA's libraries cannot be loaded: {last.removeprefix('OSError: ')}"
    )


def needed_libraries(path: Path) -> list[str]:
    """Returns the names of the libraries that a 64-bit ELF library asks for itself."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (start,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        segments = [struct.unpack_from("<I4xQQ8xQ", data, start + at * size) for at in range(count)]
        where, length = next((at, length) for kind, at, _, length in segments if kind == _DYNAMIC)
        entries = [struct.unpack_from("<QQ", data, where + at) for at in range(0, length, 16)]
        table = next(value for tag, value in entries if tag == _STRINGS)
        strings = next(
            table - address + at
            for kind, at, address, length in segments
            if kind == _LOAD and address <= table < address + length
        )
        starts = [strings + value for tag, value in entries if tag == _NEEDED]
        return [data[at : data.find(b"\0", at)].decode() for at in starts]
