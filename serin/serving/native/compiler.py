"""Finds a C++ compiler and builds the shared libraries that Triton and Envoy load, each from one source file.

The machine's own compiler is used where there is one on PATH, else the one that PyPI's `ziglang` brings (clang with its
libraries), which is installed into Triton's environment. Beside each source, a linker script of the same name (`.map`)
lists what the library exports: everything else in it, a statically linked C++ runtime included, stays hidden.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from serin.errors import TritonInstallFailed
from serin.machine import environment

logger = logging.getLogger(__name__)

PACKAGE = "ziglang==0.17.0"
_ON_PATH = ("c++", "g++", "clang++")

# nodelete: ziglang's start-up files, unlike gcc's, do not run a library's exit handlers when it is unloaded. They would
# run at the end of the process, when its code is gone: Envoy crashed.
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,nodelete")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler. `cache`: where ziglang stores the C++ runtime, which it compiles at first use (1.5 minutes, 84
    MB)."""

    command: tuple[str, ...]
    cache: Path | None = None

    def variables(self) -> dict[str, str]:
        if self.cache is None:
            return environment.child_environment()
        places = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(self.cache))
        return environment.child_environment(**places)


def machine_compiler() -> Compiler | None:
    """Returns the first C++ compiler on PATH."""
    found = (shutil.which(name, path=environment.search_path()) for name in _ON_PATH)
    path = next((path for path in found if path), None)
    return Compiler((path,)) if path else None


def packaged_compiler(folder: Path) -> Compiler | None:
    """Returns the compiler of the package ziglang in the Python environment `folder`."""
    program = next(folder.glob("lib/python3.*/site-packages/ziglang/zig"), None)
    if program is None:
        return None
    # A named target: by default ziglang takes headers and start-up files of the machine's compiler where it finds one.
    target = f"{platform.machine()}-linux-gnu"
    return Compiler((str(program), "c++", "-target", target), cache=folder / "zig-cache")


def obtain_compiler(folder: Path) -> Compiler:
    """Returns the machine's compiler, else ziglang's in the Python environment `folder`, installed there if necessary.

    Raises TritonInstallFailed when there is none and ziglang cannot be installed.
    """
    found = machine_compiler() or packaged_compiler(folder)
    if found is not None:
        return found
    logger.info(
        f"no C++ compiler is on PATH: installing {PACKAGE} into {folder}; its first compilation takes minutes"
    )
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    command = [str(folder / "bin" / "python3"), "-m", "pip", "install", *quiet, PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        said = (done.stderr or done.stdout).strip()
    except OSError as error:
        said = str(error)
    found = packaged_compiler(folder)
    if found is None:
        last = " ".join(said.splitlines()[-1:])
        reason = f"no C++ compiler is on PATH, and {PACKAGE} cannot be installed ({last})"
        raise TritonInstallFailed(step="looking for a C++ compiler", reason=reason)
    return found


def build_mark(sources: Iterable[Path], *flags: str) -> str:
    """Returns a digest of the sources and flags, by which a library built from others is recognised."""
    digest = hashlib.sha256(" ".join([*_FLAGS, *flags]).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def compile_library(
    compiler: Compiler, source: Path, library: Path, *, what: str, flags: Iterable[str] = ()
) -> None:
    """Compiles `source`. Raises TritonInstallFailed with the compiler's messages."""
    exports = f"-Wl,--version-script={source.with_suffix('.map')}"
    command = [*compiler.command, *_FLAGS, *flags, exports, "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=compiler.variables()
    )
    if done.returncode:
        raise TritonInstallFailed(step=f"compiling {what}", reason=done.stderr[-2000:])


def build_library(
    compiler: Compiler,
    source: Path,
    library: Path,
    *,
    what: str,
    tried_by: Callable[[Path], None] = lambda _: None,
) -> None:
    """Writes `library` atomically, and only if `tried_by` accepts it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    scratch = library.with_suffix(".new")
    try:
        compile_library(compiler, source, scratch, what=what)
        tried_by(scratch)
    except TritonInstallFailed:
        scratch.unlink(missing_ok=True)
        raise
    scratch.rename(library)
