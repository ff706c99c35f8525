"""Builds the library that decodes recorded requests, from the sources in sources/recorder/; decoder.py calls it.

It is built beside Triton's environment, as the gateway's request filter is: without that one nothing is recorded.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from serin.errors import TritonInstallFailed
from serin.serving.native.compiler import Compiler, build_library, build_mark

_SOURCES = Path(__file__).parent / "sources"
SOURCE = _SOURCES / "recorder" / "decode.cc"
_SHARED = ("entry.h", "faults.h", "json_data.h", "json_text.h", "message.h")


def decoder_path(folder: Path) -> Path:
    """Returns where the library is, or would be, in Triton's environment; another file for other sources."""
    used = [*SOURCE.parent.iterdir(), *(_SOURCES / "request_filter" / name for name in _SHARED)]
    return folder / "serin-recorder" / f"{build_mark(sorted(used))[:16]}.so"


def build_decoder(compiler: Compiler, library: Path) -> None:
    """Builds the library; raises TritonInstallFailed when it cannot be compiled or loaded."""
    build_library(compiler, SOURCE, library, what="the recorder's decoder", tried_by=_try)


def _try(library: Path) -> None:
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise TritonInstallFailed(step="loading the recorder's decoder", reason=str(error)) from error
