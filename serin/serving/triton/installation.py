"""Locates and installs Triton on this machine, and lists what it can run.

Triton has its own Python (its stub breaks with numpy 2), which is put first on its PATH. Two layouts are known: a
virtual environment with the nvidia-pytriton wheel, and a folder as in NVIDIA's container (/opt/tritonserver), to which
`serin install triton` adds an environment with the other packages.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serin.errors import TritonInstallFailed, TritonMissing
from serin.machine import environment
from serin.serving.native import onnx_backend
from serin.serving.native.compiler import Compiler, machine_compiler, obtain_compiler
from serin.serving.native.decoder_library import build_decoder, decoder_path
from serin.serving.native.grpc_cancel_guard import build_cancel_guard, cancel_guard_path
from serin.serving.native.onnx_backend import NATIVE
from serin.serving.native.request_filter import build_request_filter, request_filter_path

if TYPE_CHECKING:
    from serin.serving.triton.backends import Server

logger = logging.getLogger(__name__)

WHEEL, NUMPY = "nvidia-pytriton==0.7.0", "numpy==1.26.4"
CONTAINER_FOLDER = Path("/opt/tritonserver")
NO_FILTER = (
    "no request filter: the gateway listens on the loopback interface only and answers no gRPC calls "
    "(`serin install gateway` builds the filter)"
)

_NEWEST_PYTHON = (3, 12)
_PROVIDERS = ("libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonInstall:
    """A Triton that can be started. `python_folder` comes first on the PATH of its process."""

    server: Path
    backends: Path
    python_folder: Path
    libraries: tuple[Path, ...]
    cancel_guard: Path | None = None  # for the wheel's version only (native/grpc_cancel_guard.py)

    @property
    def lacks_cancel_guard(self) -> bool:
        return self.cancel_guard is None and self.server.is_relative_to(self.python_folder.parent)

    def describe(self, *, gpus: bool) -> Server:
        """Returns what it can run. Its Python is asked for accelerators only where there are GPUs."""
        from serin.serving.triton.backends import Server  # here: `serin up` needs neither arrays nor specs

        found = self.backends.iterdir() if self.backends.is_dir() else ()
        backends = frozenset(path.name for path in found if path.is_dir())
        if not onnx_backend.is_built(self.backends):
            backends -= {NATIVE}  # built from other sources than the present ones
        accelerators = _accelerators(self.python_folder) if gpus and "python" in backends else frozenset()
        no_cuda = ""
        if NATIVE in backends and "cuda" in accelerators:
            runtime = onnx_backend.runtime_library(self.backends)
            no_cuda = why_no_cuda(runtime, self.library_path(gpu=True))
        return Server(backends=backends, accelerators=accelerators, no_cuda=no_cuda)

    def library_path(self, *, gpu: bool) -> list[str]:
        """Returns where its processes look for libraries: Triton's own, and on a GPU CUDA's after them."""
        found = [str(path) for path in self.libraries]
        return [*found, *cuda_folders(self.python_folder.parent)] if gpu else found


def default_folder() -> Path:
    """Returns where `install_triton` creates Triton's environment: beside the one that runs now."""
    prefix = Path(sys.prefix)
    return prefix.with_name(f"{prefix.name}-triton")


def find_triton() -> TritonInstall:
    """Returns the Triton that SERIN_TRITON names, and only that if it is set; else Serin's own, else a container's."""
    named = environment.path("SERIN_TRITON")
    places = [named] if named else [default_folder(), CONTAINER_FOLDER]
    for place in places:
        install = _from_environment(place) or _from_container(place)
        if install:
            return install
    raise TritonMissing(looked_in=[str(place) for place in places])


def find_request_filter() -> Path | None:
    """Returns the gateway's request filter, if it was built."""
    path = request_filter_path(default_folder())
    return path if path.is_file() else None


def find_decoder() -> Path | None:
    """Returns the library that decodes recorded requests, if it was built."""
    path = decoder_path(default_folder())
    return path if path.is_file() else None


def install_request_filter() -> Path:
    """Builds the gateway's request filter and the recorder's decoder where they are missing, beside any Triton. Raises
    TritonInstallFailed with the reason."""
    folder = default_folder()
    builds = _gateway_builds(folder)
    if builds:
        if machine_compiler() is None:
            _make_environment(folder)
        compiler = obtain_compiler(folder)
        for name, build in builds.items():
            logger.info(f"compiling {name}")
            build(compiler)
    return request_filter_path(folder)


def _gateway_builds(folder: Path) -> dict[str, Callable[[Compiler], None]]:
    """Returns how to build what the gateway lacks."""
    builds: dict[str, Callable[[Compiler], None]] = {}
    if find_request_filter() is None:
        builds["the gateway's request filter"] = lambda c: build_request_filter(
            c, request_filter_path(folder)
        )
    if find_decoder() is None:
        builds["the recorder's decoder"] = lambda c: build_decoder(c, decoder_path(folder))
    return builds


def install_triton() -> TritonInstall:
    """Creates Triton's environment, or completes one that is partial or has another ONNX Runtime.

    Takes about half a minute and 400 MB. Where SERIN_TRITON names a server as in NVIDIA's container, the environment is
    for the models of that one, which also gets Serin's ONNX backend.
    """
    folder, runtime, named = default_folder(), _runtime(), environment.path("SERIN_TRITON")
    other = named is not None and _from_container(named) is not None
    if (not other and _from_environment(folder) is None) or _stale_runtime(folder, runtime):
        python = _make_environment(folder)
        packages = [runtime, NUMPY] if other else [WHEEL, runtime, NUMPY]
        logger.info(f"installing {', '.join(packages)}")
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
        _run([str(python), "-m", "pip", "install", *quiet, *packages], "installing Triton's packages")
    install = _from_container(named) if named and other else _from_environment(folder)
    if install is None:
        raise TritonInstallFailed(step="checking the installation", reason=f"{folder} has no Triton")
    _complete(install)
    logger.info(f"Triton is installed in {named if other else folder}")
    return install


def _make_environment(folder: Path) -> Path:
    """Returns the Python of Triton's environment, which is created if it is missing."""
    python = folder / "bin" / "python3"
    if not python.exists():
        logger.info(f"making {folder}")
        base = _base_python(sys.version_info[:2])
        _run([base, "-m", "venv", str(folder)], "creating a virtual environment")
    return python


def shortcomings(install: TritonInstall) -> list[str]:
    """Lists what a Triton that `serin install triton` made or completed lacks; another one is not checked."""
    folder = install.python_folder.parent
    if folder != default_folder():
        return []
    found = []
    if NATIVE not in install.describe(gpus=False).backends:
        found.append(
            f"no backend {NATIVE} of this version: models run in Triton's Python backend, which is slower"
        )
    if install.lacks_cancel_guard:
        found.append("no guard against cancelled gRPC calls: a client that cancels one may crash Triton")
    if stale := _stale_runtime(folder, _runtime()):
        found.append(f"its ONNX Runtime is {stale}, but this environment has {_runtime().rpartition('=')[2]}")
    return found


def _stale_runtime(folder: Path, wanted: str) -> str:
    """Returns the version of Triton's ONNX Runtime if it is not the wanted one; else empty."""
    found = next(folder.glob("lib/python3.*/site-packages/onnxruntime*.dist-info"), None)
    version = found.name.removesuffix(".dist-info").rpartition("-")[2] if found else "none"
    return "" if version == wanted.rpartition("=")[2] else version


def _complete(install: TritonInstall) -> None:
    """Builds the missing ones of Serin's native libraries: the ONNX backend, the gRPC cancel guard, the request filter
    and the recorder's decoder.

    Models are served without them too, with the limits that `shortcomings` lists.
    """
    folder = install.python_folder.parent
    packages = next(folder.glob("lib/python3.*/site-packages"))
    builds: dict[str, Callable[[Compiler], None]] = {}
    if install.lacks_cancel_guard:
        builds["the gRPC cancel guard"] = lambda c: build_cancel_guard(c, cancel_guard_path(folder))
    builds |= _gateway_builds(folder)
    if not onnx_backend.is_built(install.backends):
        builds["the ONNX backend"] = lambda c: onnx_backend.build(
            c, install.backends, packages / "onnxruntime"
        )
    if not builds:
        return
    try:
        compiler = obtain_compiler(folder)
    except TritonInstallFailed as error:
        logger.info(f"without {', '.join(builds)}: {error.fields['reason']}")
        return
    for name, build in builds.items():
        logger.info(f"compiling {name}")
        try:
            build(compiler)
        except TritonInstallFailed as error:
            logger.info(f"without {name}: {error.fields['reason']}")


def _accelerators(python_folder: Path) -> frozenset[str]:
    """Returns the accelerators that the ONNX Runtime of Triton's Python was built for; whether they start is known at
    load."""
    code = "import onnxruntime; print(*onnxruntime.get_available_providers())"
    try:
        done = subprocess.run(
            [str(python_folder / "python3"), "-c", code],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            env=environment.child_environment(PYTHONPATH=None, PYTHONHOME=None, VIRTUAL_ENV=None),
        )
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    names = {"CUDAExecutionProvider": "cuda", "TensorrtExecutionProvider": "tensorrt"}
    return frozenset(names[word] for word in done.stdout.split() if word in names)


def _from_environment(folder: Path) -> TritonInstall | None:
    packages = next(folder.glob("lib/python3.*/site-packages"), None)
    settings = folder / "pyvenv.cfg"
    if packages is None or not settings.is_file():
        return None
    minor = packages.parent.name.removeprefix("python")
    wheel = packages / "pytriton" / "tritonserver"
    server = wheel / "bin" / "tritonserver"
    stub = wheel / "python_backend_stubs" / minor / "triton_python_backend_stub"
    needed = [server, stub, packages / "onnxruntime", packages / "numpy"]
    if not all(path.exists() for path in needed):
        return None
    backends, cancel_guard = folder / "serin-backends", cancel_guard_path(folder)
    _link_backend(backends, [*(wheel / "backends" / "python").glob("*.*"), stub])
    return TritonInstall(
        server=server,
        backends=backends,
        python_folder=folder / "bin",
        libraries=(packages / "nvidia_pytriton.libs", _base_folder(settings) / "lib"),
        cancel_guard=cancel_guard if cancel_guard.is_file() else None,
    )


def _from_container(folder: Path) -> TritonInstall | None:
    server, backends = folder / "bin" / "tritonserver", folder / "backends"
    if not server.is_file() or not backends.is_dir():
        return None
    search = f"{default_folder() / 'bin'}:{environment.search_path()}"
    python = shutil.which("python3", path=search)
    if python is None:
        return None
    return TritonInstall(
        server=server, backends=backends, python_folder=Path(python).parent, libraries=(folder / "lib",)
    )


def _link_backend(backends: Path, files: list[Path]) -> None:
    """Links the backend and its stub into one folder, as Triton needs them; the wheel keeps them apart."""
    if all((backends / "python" / file.name).exists() for file in files):
        return
    shutil.rmtree(backends, ignore_errors=True)  # links into an environment that was created again
    scratch = backends.with_name(f".{backends.name}.{secrets.token_hex(6)}")
    try:
        (scratch / "python").mkdir(parents=True)
        for file in files:
            (scratch / "python" / file.name).symlink_to(file)
        scratch.rename(backends)
    except OSError as error:
        if not backends.is_dir():  # else another process was faster
            raise TritonInstallFailed(step="creating the backend folder", reason=str(error)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _runtime() -> str:
    """Returns the ONNX Runtime that passed the gate: the one of this environment, for a GPU with CUDA's libraries."""
    for name, wanted in (("onnxruntime-gpu", "onnxruntime-gpu[cuda,cudnn]"), ("onnxruntime", "onnxruntime")):
        try:
            return f"{wanted}=={importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise TritonInstallFailed(
        step="looking for ONNX Runtime", reason="this environment has none; install serin[cpu] or serin[gpu]"
    )


def _base_python(running: tuple[int, int]) -> str:
    """Returns the Python for Triton's environment: numpy 1.26 is not built for 3.13."""
    if running <= _NEWEST_PYTHON:
        return sys.executable
    for name in ("python3.12", "python3.11", "python3.10"):
        found = shutil.which(name, path=environment.search_path())
        if found:
            return found
    raise TritonInstallFailed(
        step="looking for a Python", reason=f"{NUMPY} needs python3.12 or older on PATH beside this Python"
    )


def _base_folder(settings: Path) -> Path:
    """Returns the folder of the Python that created a virtual environment: the stub needs its libpython."""
    for line in settings.read_text().splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            return Path(value.strip()).parent
    raise TritonInstallFailed(step=f"reading {settings}", reason="it has no entry `home`")


def _run(command: list[str], step: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise TritonInstallFailed(step=step, reason=str(error)) from error
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise TritonInstallFailed(step=step, reason=last)


# They come from packages (`nvidia-*`) beside Triton's ONNX Runtime or beside this process's, so that nobody has to set
# LD_LIBRARY_PATH; where it is set, its folders come after these.
def cuda_folders(environment_folder: Path) -> list[str]:
    """Returns the folders of CUDA's libraries for processes of the Python environment `environment_folder`."""
    folders = [environment_folder, Path(sys.prefix)]
    found = [path for folder in folders for path in folder.glob("lib/python3.*/site-packages/nvidia/*/lib")]
    spec = importlib.util.find_spec("nvidia")  # also in folders that a .pth file names
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found += sorted(Path(place).glob("*/lib"))
    inherited = environment.child_environment().get("LD_LIBRARY_PATH", "")
    return list(dict.fromkeys([*map(str, found), *(path for path in inherited.split(":") if path)]))


def why_no_cuda(runtime: Path, library_path: list[str]) -> str:
    """Returns why the CUDA provider beside the ONNX Runtime `runtime` cannot be loaded; empty when it can.

    The dynamic loader looks for all libraries that the provider needs, the driver's among them, with the release's
    library path. It runs none of their code: the provider crashes a process that is not ONNX Runtime's.
    """
    paths = [runtime.with_name(name) for name in _PROVIDERS]
    if missing := [path.name for path in paths if not path.is_file()]:
        return f"its ONNX Runtime has no {' and no '.join(missing)}; install onnxruntime-gpu"
    variables = environment.child_environment(LD_LIBRARY_PATH=":".join(library_path) or None, LC_ALL="C")
    try:
        done = subprocess.run(
            ["ldd", str(paths[-1])], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=variables
        )
    except OSError as error:
        return f"CUDA's libraries cannot be tried: {error}"
    if done.returncode:
        last = " ".join((done.stderr + done.stdout).strip().splitlines()[-1:])
        return f"{paths[-1].name} cannot be read: {last.strip()}"
    lost = [line.strip() for line in done.stdout.splitlines() if line.endswith("not found")]
    return f"CUDA's libraries cannot be loaded: {lost[0]}" if lost else ""
