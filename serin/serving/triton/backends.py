"""Chooses the Triton backend for a bundle by the server's backends, the bundle's content and the spec.

Pure. A backend that is named in the spec and cannot be used raises BackendRefused; it is never replaced. `auto` takes
the first that can be used, and `Choice.reason` says why, for the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from serin.errors import BackendRefused
from serin.formats.bundle import CORE, FRONT, MODEL, PLAN, TREES
from serin.formats.schema import Task
from serin.serving.native.onnx_backend import NATIVE
from serin.spec.serving import ServingSpec

Backend = Literal["onnx_native", "onnx_python", "onnxruntime", "ensemble", "tensorrt_plan", "fil"]
Runner = Literal["python", "onnxruntime", "tensorrt", "fil"]  # a backend of Triton's, by its folder
Place = Literal["cpu", "gpu"]

PLAN_PROFILE_ROWS = (1, 8, 64)  # an engine has a profile for each, and one for the largest batch
_IN_TWO: tuple[Backend, ...] = ("tensorrt_plan", "onnx_native", "ensemble", "onnx_python", "onnxruntime")
_WHOLE: tuple[Backend, ...] = ("onnxruntime", "onnx_native", "onnx_python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a Triton has: its backends, and the accelerators of the ONNX Runtime in the Python of its models.

    `no_cuda`: why Serin's own backend cannot use a GPU; empty: it can, or there is none.
    """

    backends: frozenset[str] = frozenset({"python"})
    accelerators: frozenset[str] = frozenset()  # of cuda, tensorrt
    no_cuda: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The parts of a bundle that decide. `plan_rows`: the largest batch its engine was built for.

    `empty`: the name of an inner tensor without columns, which Triton cannot pass between models.
    """

    model: str
    files: frozenset[str]
    task: Task
    answers: int = 1  # columns of the first output
    plan_rows: int | None = None
    empty: str | None = None
    strings_out: str | None = None  # an output of strings, if there is one

    @property
    def for_gpu(self) -> bool:
        return CORE in self.files or PLAN in self.files


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A chosen backend. `front` and `core`: the backends of a model in two parts; None for a single model."""

    backend: Backend
    place: Place
    reason: str
    front: Runner | None = None
    core: Runner | None = None

    def __str__(self) -> str:
        where = "a GPU" if self.place == "gpu" else "the CPU"
        parts = f" (front by {self.front}, core by {self.core})" if self.front else ""
        return f"{self.backend} on {where}{parts}: {self.reason}"


def choose_backend(contents: Contents, server: Server, serving: ServingSpec, gpus: int) -> Choice:
    """Chooses the backend. `gpus`: how many this machine has."""
    place = _place(contents, serving, gpus)
    if serving.backend != "auto":
        return _named(contents, server, serving, serving.backend, place)
    tried: list[str] = []
    if place == "gpu":
        for backend in _on_gpu(contents):
            if backend == "ensemble" and "onnxruntime" not in server.backends:
                continue  # two models of the Python backend are slower than one that does both parts
            why_not = _obstacle(contents, server, serving, backend, "gpu")
            if not why_not:
                slower = f"; not {'; '.join(tried)}" if backend == "onnx_python" and tried else ""
                reason = f"the first that fits this server and {contents.model}{slower}"
                return _choice(server, backend, "gpu", reason)
            tried.append(f"{backend}: {why_not}")
        if serving.device == "gpu":
            raise BackendRefused(
                model=contents.model,
                asked="serving.device: gpu",
                reason="; ".join(tried),
                instead="serve it from a Triton that has one of these, or set serving.device: cpu",
            )
    why_cpu = f"no GPU ({'; '.join(tried)})" if tried else _why_cpu(contents, serving, gpus)
    tried.clear()
    for backend in _WHOLE:
        why_not = _obstacle(contents, server, serving, backend, "cpu")
        if not why_not:
            return _choice(server, backend, "cpu", why_cpu)
        tried.append(f"{backend}: {why_not}")
    raise BackendRefused(
        model=contents.model,
        asked="this Triton",
        reason="; ".join(tried),
        instead="install one that can with `serin install triton`",
    )


def _on_gpu(contents: Contents) -> tuple[Backend, ...]:
    if TREES in contents.files:
        return ("fil",)  # ONNX Runtime runs trees on the CPU alone
    return _IN_TWO if contents.for_gpu else _WHOLE


def _place(contents: Contents, serving: ServingSpec, gpus: int) -> Place:
    if serving.device == "cpu" or (serving.device == "auto" and serving.gpus == 1 and gpus == 0):
        return "cpu"
    if gpus < serving.gpus:
        asked = "serving.device: gpu" if serving.gpus == 1 else f"serving.gpus: {serving.gpus}"
        raise BackendRefused(
            model=contents.model,
            asked=asked,
            reason=f"this machine has {gpus} GPU(s)",
            instead="serve it where there are more, or set serving.device: cpu",
        )
    return "gpu" if contents.for_gpu or names_gpus(serving) else "cpu"


def names_gpus(serving: ServingSpec) -> bool:
    """Returns whether a spec asks for a GPU whatever its bundle contains."""
    return serving.device == "gpu" or serving.gpus > 1


def _named(
    contents: Contents, server: Server, serving: ServingSpec, backend: Backend, place: Place
) -> Choice:
    why_not = _obstacle(contents, server, serving, backend, place)
    free = place == "gpu" and serving.device == "auto" and serving.gpus == 1
    if why_not and free and not _obstacle(contents, server, serving, backend, "cpu"):
        return _choice(server, backend, "cpu", f"set in the spec; no GPU ({why_not})")
    if why_not:
        raise BackendRefused(
            model=contents.model,
            asked=f"serving.backend: {backend}",
            reason=why_not,
            instead="remove serving.backend to use what this server supports",
        )
    return _choice(server, backend, place, "named in the spec")


def _obstacle(
    contents: Contents, server: Server, serving: ServingSpec, backend: Backend, place: Place
) -> str:
    """Returns why `backend` cannot serve this bundle in this place; empty when it can."""
    needed: Mapping[Backend, tuple[str, ...]] = {
        "onnx_native": (MODEL,),
        "onnx_python": (MODEL,),
        "onnxruntime": (MODEL,),
        "ensemble": (FRONT, CORE),
        "tensorrt_plan": (FRONT, PLAN),
        "fil": (FRONT, TREES),
    }
    if missing := [name for name in needed[backend] if name not in contents.files]:
        return f"the bundle has no {' and no '.join(missing)} (export it with export.target: gpu)"
    in_two = backend in ("ensemble", "tensorrt_plan", "fil")
    if in_two and _front(server) is None:
        return f"its front needs the onnxruntime or the python backend; the server has {_have(server)}"
    if in_two and backend != "fil" and contents.empty:
        return f"the tensor {contents.empty!r} between front and core has no columns"
    match backend:
        case "onnx_native":
            return _native_obstacle(contents, server, serving, place)
        case "onnx_python":
            return _python_obstacle(server, serving, place)
        case "onnxruntime":
            return "" if "onnxruntime" in server.backends else _no_backend("onnxruntime", server)
        case "ensemble":
            return "" if "onnxruntime" in server.backends else _python_obstacle(server, serving, place)
        case "tensorrt_plan":
            return _plan_obstacle(contents, server, serving, place)
        case "fil":
            return _fil_obstacle(contents, server)


def _native_obstacle(contents: Contents, server: Server, serving: ServingSpec, place: Place) -> str:
    if NATIVE not in server.backends:
        return _no_backend(NATIVE, server)
    if place == "cpu":
        return ""
    if missing := [name for name in (FRONT, CORE) if name not in contents.files]:
        return f"on a GPU it needs {' and '.join(missing)} (export it with export.target: gpu)"
    if serving.accelerator != "cuda":
        return f"on a GPU it uses cuda alone, not {serving.accelerator}"
    if contents.strings_out:
        return f"its output {contents.strings_out!r} holds strings, which a GPU does not"
    if "cuda" not in server.accelerators:
        return "the ONNX Runtime of this Triton has no provider for cuda"
    return server.no_cuda


def _python_obstacle(server: Server, serving: ServingSpec, place: Place) -> str:
    if "python" not in server.backends:
        return _no_backend("python", server)
    if place == "gpu" and serving.accelerator not in server.accelerators:
        return f"the ONNX Runtime of its Python has no provider for {serving.accelerator}"
    return ""


def _plan_obstacle(contents: Contents, server: Server, serving: ServingSpec, place: Place) -> str:
    if place == "cpu":
        return "an engine needs a GPU"
    if "tensorrt" not in server.backends:
        return _no_backend("tensorrt", server)
    if contents.plan_rows is not None and serving.max_batch_rows > contents.plan_rows:
        return (
            f"serving.max_batch_rows={serving.max_batch_rows} is beyond the {contents.plan_rows} rows that its engine "
            "was built for"
        )
    return ""


def _fil_obstacle(contents: Contents, server: Server) -> str:
    if "fil" not in server.backends:
        return _no_backend("fil", server)
    if contents.task == "multiclass" or contents.answers > 1:
        return "it has one output per row, but the model has several"
    return ""


def _choice(server: Server, backend: Backend, place: Place, reason: str) -> Choice:
    cores: Mapping[Backend, Runner] = {"tensorrt_plan": "tensorrt", "fil": "fil"}
    if backend in ("onnx_native", "onnx_python", "onnxruntime"):
        return Choice(backend=backend, place=place, reason=reason)
    front = _front(server)
    return Choice(backend=backend, place=place, reason=reason, front=front, core=cores.get(backend, front))


def _front(server: Server) -> Runner | None:
    if "onnxruntime" in server.backends:
        return "onnxruntime"
    return "python" if "python" in server.backends else None


def _why_cpu(contents: Contents, serving: ServingSpec, gpus: int) -> str:
    if serving.device == "cpu":
        return "named in the spec"
    if gpus == 0:
        return "this machine has no GPU"
    return f"{contents.model} was exported for the CPU"


def _no_backend(name: str, server: Server) -> str:
    return f"the server has no {name} backend; it has {_have(server)}"


def _have(server: Server) -> str:
    return ", ".join(sorted(server.backends)) or "none"
