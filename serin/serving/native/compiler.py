"""The machine's C++ compiler, for what is loaded into Triton and Envoy: shared libraries from a single source each."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from serin.errors import TritonInstallFailed
from serin.machine import environment

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")


def find_compiler() -> str:
    found = (shutil.which(name, path=environment.search_path()) for name in _COMPILERS)
    compiler = next((path for path in found if path), None)
    if compiler is None:
        raise TritonInstallFailed(step="looking for a C++ compiler", reason="no C++ compiler is on PATH")
    return compiler


def build_mark(sources: Iterable[Path], *flags: str) -> str:
    """Of what a library is made: other sources, or the same with other flags, are another library."""
    digest = hashlib.sha256(" ".join([*_FLAGS, *flags]).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def compile_library(compiler: str, source: Path, library: Path, *flags: str, what: str) -> None:
    """TritonInstallFailed, with what the compiler said, when `source` cannot be compiled."""
    command = [compiler, *_FLAGS, *flags, "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise TritonInstallFailed(step=f"compiling {what}", reason=done.stderr[-2000:])


def build_library(
    source: Path,
    library: Path,
    *flags: str,
    what: str,
    tried_by: Callable[[Path], None] = lambda _: None,
) -> None:
    """Whole or not at all, and only when `tried_by` takes it. TritonInstallFailed when there is no compiler."""
    compiler = find_compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    scratch = library.with_suffix(".new")
    try:
        compile_library(compiler, source, scratch, *flags, what=what)
        tried_by(scratch)
    except TritonInstallFailed:
        scratch.unlink(missing_ok=True)
        raise
    scratch.rename(library)
