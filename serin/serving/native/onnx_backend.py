"""Builds Serin's ONNX backend for Triton from the sources in triton_models/onnx_native, and writes its settings.

It runs a bundle's graph inside Triton's process, on the CPU or with its core on a GPU; without it, a Python process
beside Triton does the same and costs more. It uses the library of the ONNX Runtime in Triton's environment.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serin.errors import TritonInstallFailed
from serin.formats.schema import DType, OutputTensor, Schema
from serin.machine.environment import application_folder
from serin.serving.native.compiler import Compiler, build_mark, compile_library

NATIVE = "serin_onnx"  # its name among Triton's backends
SETTINGS = "native.txt"
SOURCES = application_folder() / "triton_models" / "onnx_native"
SOURCE = SOURCES / "backend.cc"
FLAGS = ("-pthread",)
LIBRARY = f"libtriton_{NATIVE}.so"

_RUNTIME = "libonnxruntime.so"
_KINDS: dict[DType, str] = {"FP32": "float", "INT64": "int", "INT8": "bool"}
_FINE_FROM = 64  # rows: below, the next power of two costs a GPU nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A model whose front runs on the CPU and whose core on a device. `inner`: the tensors between them.

    `workers`: threads that run the front, each on a part of a batch's rows. `arena_bytes`: what ONNX Runtime may use on
    the device.
    """

    inner: tuple[OutputTensor, ...]
    max_rows: int
    workers: int
    piece_rows: int = 256
    arena_bytes: int | None = None
    provider: Literal["cuda", "cpu"] = "cuda"
    graphs: bool = True

    def lines(self, outputs: Sequence[OutputTensor]) -> list[str]:
        sizes = ",".join(map(str, batch_sizes(self.max_rows)))
        limits = f"{self.arena_bytes or 0} {int(self.graphs)} {self.workers} {self.piece_rows}"
        tensors = [("inner", tensor) for tensor in self.inner] + [("outer", tensor) for tensor in outputs]
        return [
            f"split {self.provider} {limits} {sizes}",
            *(
                f"{word} {_KINDS[tensor.dtype]} {','.join(map(str, tensor.dims))} {tensor.name.encode().hex()}"
                for word, tensor in tensors
            ),
        ]


def batch_sizes(max_rows: int) -> list[int]:
    """Returns the sizes of batches that a core is prepared for: a batch is filled up to the next one.

    Powers of two, and from 64 rows also one in the middle between two: no batch grows by more than a half then.
    """
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        if size >= _FINE_FROM and size * 3 // 2 < max_rows:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, max_rows]


def unsupported_output(outputs: Sequence[OutputTensor]) -> str | None:
    """Returns the name of an output that a core on a device cannot have: strings stay on the CPU."""
    return next((output.name for output in outputs if output.dtype not in _KINDS), None)


def is_built(backends: Path) -> bool:
    """Returns whether it was built from these sources with these flags, for an ONNX Runtime that still exists."""
    folder = backends / NATIVE
    marks = folder / "sources"
    made = marks.is_file() and marks.read_text() == _mark()
    return made and (folder / LIBRARY).is_file() and (folder / _RUNTIME).is_file()


def runtime_library(backends: Path) -> Path:
    """Returns the ONNX Runtime that it uses: its providers are in the same folder."""
    return (backends / NATIVE / _RUNTIME).resolve()


def build(compiler: Compiler, backends: Path, runtime: Path) -> None:
    """Builds it into its folder among Triton's backends. `runtime`: the folder of Triton's onnxruntime package.

    TritonInstallFailed when it cannot be compiled, or there is no library to build for.
    """
    library = next(iter(sorted(runtime.glob("capi/libonnxruntime.so.*"))), None)
    if library is None:
        raise TritonInstallFailed(step="looking for ONNX Runtime's library", reason=f"{runtime} holds none")
    mark = secrets.token_hex(6)
    scratch, old = backends / f".{NATIVE}.{mark}", backends / f".{NATIVE}.{mark}.old"
    scratch.mkdir(parents=True)
    made = scratch / LIBRARY
    try:
        compile_library(compiler, SOURCE, made, what="the ONNX backend", flags=FLAGS)
    except TritonInstallFailed:
        shutil.rmtree(scratch)
        raise
    (scratch / _RUNTIME).symlink_to(library)
    (scratch / "sources").write_text(_mark())
    if (backends / NATIVE).exists():
        (backends / NATIVE).rename(old)  # a Triton that runs it keeps what it has open
    scratch.rename(backends / NATIVE)
    shutil.rmtree(old, ignore_errors=True)


def native_settings(
    schema: Schema,
    *,
    threads: int,
    max_string_bytes: int,
    split: Split | None = None,
) -> bytes:
    """Returns the file that the backend reads beside the graph (columns.h). Names are hexadecimal: any name is
    allowed. `split`: for a model in two parts."""
    lines = [f"threads {threads}", f"max_string_bytes {max_string_bytes}"]
    for column in schema.inputs:
        dims = ",".join(map(str, column.dims))
        lines.append(f"input {column.kind} {dims} {column.name.encode().hex()}")
    lines += [f"output {output.name.encode().hex()}" for output in schema.outputs]
    parts = split.lines(schema.outputs) if split else ()
    return "\n".join([*lines, *parts, ""]).encode()


def _mark() -> str:
    sources = sorted(file for kind in ("*.h", "*.cc", "*.map") for file in SOURCES.glob(kind))
    return build_mark(sources, *FLAGS)
