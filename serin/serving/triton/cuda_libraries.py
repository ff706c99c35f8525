"""CUDA's libraries for a release on a GPU: where they are, and whether ONNX Runtime's provider can be loaded with them.

They come from packages (`nvidia-*`) beside Triton's ONNX Runtime or beside this process's, so that nobody has to set
LD_LIBRARY_PATH; where it is set, its folders come after these.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from serin.machine import environment

# ONNX Runtime loads them in this order too. The second needs CUDA's libraries and the driver's.
_PROVIDERS = ("libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so")
_TRY = "import ctypes, sys; [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in sys.argv[1:]]"
_TRY_S = 60


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

    Triton's Python tries it in a process with the release's library path.
    """
    paths = [runtime.with_name(name) for name in _PROVIDERS]
    if missing := [path.name for path in paths if not path.is_file()]:
        return f"its ONNX Runtime has no {' and no '.join(missing)}; install onnxruntime-gpu"
    variables = environment.child_environment(
        LD_LIBRARY_PATH=":".join(library_path) or None, PYTHONPATH=None, PYTHONHOME=None, VIRTUAL_ENV=None
    )
    try:
        done = subprocess.run(
            [str(python_folder / "python3"), "-c", _TRY, *map(str, paths)],
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
