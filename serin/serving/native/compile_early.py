"""Compiles Serin's native libraries while packages are still downloaded: `python -m serin.serving.native.compile_early
FOLDER`, with the folder of Triton's environment.

`serin install triton` finds them there and does the rest, which needs the packages: Envoy must accept the request
filter, the ONNX backend is linked with its ONNX Runtime. This module runs before anything is installed, so that it must
import only the standard library. A failure is not final either: `serin install triton` compiles what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from serin.errors import TritonInstallFailed
from serin.serving.native import decoder_library, grpc_cancel_guard, onnx_backend, request_filter
from serin.serving.native.compiler import build_library, early_library, obtain_compiler

LIBRARIES: tuple[tuple[str, Path, tuple[str, ...]], ...] = (
    ("the gRPC cancel guard", grpc_cancel_guard.SOURCE, ()),
    ("the gateway's request filter", request_filter.source_file(), ()),
    ("the recorder's decoder", decoder_library.SOURCE, ()),
    ("the ONNX backend", onnx_backend.SOURCE, onnx_backend.FLAGS),
)


def compile_early(folder: Path, libraries: Iterable[tuple[str, Path, tuple[str, ...]]] = LIBRARIES) -> None:
    """Compiles the libraries that were not compiled early yet. `folder`: Triton's environment."""
    compiler = obtain_compiler(folder)
    for what, source, flags in libraries:
        library = early_library(compiler, source, flags)
        assert library is not None
        if not library.is_file():
            build_library(compiler, source, library, what=what, flags=flags)


def main(folder: Path) -> None:
    try:
        compile_early(folder)
    except TritonInstallFailed as error:
        sys.exit(f"not compiled early: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
