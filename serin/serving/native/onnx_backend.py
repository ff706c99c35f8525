"""Builds Serin's ONNX backend for Triton from the sources in triton_models/onnx_native, and writes its settings.

It runs a bundle's graph inside Triton's process; without it, a Python process beside Triton does the same and costs
more. It uses the library of the ONNX Runtime in Triton's environment.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from serin.errors import TritonInstallFailed
from serin.formats.schema import Schema
from serin.machine import environment
from serin.serving.native.compiler import Compiler, build_mark, compile_library

NATIVE = "serin_onnx"  # its name among Triton's backends
SETTINGS = "native.txt"
SOURCES = environment.application_folder() / "triton_models" / "onnx_native"
LIBRARY = f"libtriton_{NATIVE}.so"

_RUNTIME = "libonnxruntime.so"
_FLAGS = ("-pthread",)


def is_built(backends: Path) -> bool:
    """Returns whether it was built from these sources with these flags, for an ONNX Runtime that still exists."""
    folder = backends / NATIVE
    marks = folder / "sources"
    made = marks.is_file() and marks.read_text() == _mark()
    return made and (folder / LIBRARY).is_file() and (folder / _RUNTIME).is_file()


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
    source, made = SOURCES / "backend.cc", scratch / LIBRARY
    try:
        compile_library(compiler, source, made, what="the ONNX backend", flags=_FLAGS)
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
    schema: Schema, *, threads: int, max_string_bytes: int, recording: Sequence[str] = ()
) -> bytes:
    """Returns the file that the backend reads beside the graph (columns.h). Names are hexadecimal: any name is
    allowed. `recording`: the lines that say which requests are recorded."""
    lines = [f"threads {threads}", f"max_string_bytes {max_string_bytes}"]
    for column in schema.inputs:
        dims = ",".join(map(str, column.dims))
        lines.append(f"input {column.kind} {dims} {column.name.encode().hex()}")
    lines += [f"output {output.name.encode().hex()}" for output in schema.outputs]
    return "\n".join([*lines, *recording, ""]).encode()


def _mark() -> str:
    sources = sorted(file for kind in ("*.h", "*.cc", "*.map") for file in SOURCES.glob(kind))
    return build_mark(sources, *_FLAGS)
