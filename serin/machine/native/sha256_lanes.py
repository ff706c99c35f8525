"""SHA-256 of many byte strings at once: compiled, one in each lane of the processor's vectors; else by hashlib.

The library is compiled by the machine's C++ compiler beside the first long computation, and kept in the home folder.
Until then, and where it gains nothing (processors with SHA instructions, which hashlib uses, and without AVX-512),
hashlib does the work: the digests are the same. hashlib needs the interpreter's lock for every piece, so that many
threads wait for it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
import secrets
import subprocess
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serin.machine import environment
from serin.machine.durable import make_private
from serin.machine.native.compiler import machine_compiler

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32
WORTH_BUILDING_BYTES = 2**24  # less is not worth a second of a compiler
_SOURCE = Path(__file__).with_name("sha256_lanes.cpp")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wl,--as-needed")
_VECTORS = {"avx512": ("-mavx512f", "-mavx512bw"), "avx2": ("-mavx2",)}
_NEEDED = {"avx512": {"avx512f", "avx512bw"}, "avx2": {"avx2"}}
_COMPILED_S = 120


class Lanes:
    """A compiled library; ValueError when its digests are wrong."""

    def __init__(self, library: Path) -> None:
        self._many = ctypes.CDLL(str(library)).serin_sha256_many  # releases the interpreter's lock
        self._many.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._many.restype = None
        content = bytes(range(256)) * 10
        for piece in (1, 55, 56, 63, 64, 65, 119, 120, 128, 200):
            if self.digests_of_pieces(np.frombuffer(content, np.uint8), piece) != _by_hashlib(content, piece):
                raise ValueError(f"{library} computes other digests than hashlib")

    def digests_of_pieces(self, content: npt.NDArray[np.uint8], piece: int) -> bytes:
        """The digests of each `piece` bytes of the contiguous content, the last of which may be shorter."""
        starts = np.arange(0, len(content), piece, dtype=np.uintp)
        sizes = np.minimum(np.uintp(len(content)) - starts, np.uintp(piece))
        places = starts + np.uintp(content.ctypes.data)
        out = ctypes.create_string_buffer(DIGEST_BYTES * len(places))
        self._many(places.ctypes.data, sizes.ctypes.data, len(places), out)
        return out.raw


def digests_of_pieces(content: memoryview | bytes, piece: int, *, expected_bytes: int | None = None) -> bytes:
    """The SHA-256 of each `piece` bytes of the content, one after the other; the last piece may be shorter.

    `expected_bytes`: how many there are in all, when more content follows.
    """
    build = max(len(content), expected_bytes or 0) >= WORTH_BUILDING_BYTES
    lanes = _find_lanes(build=build) if build or len(content) > piece else None
    if lanes is not None and len(content) > piece:
        return lanes.digests_of_pieces(np.frombuffer(content, np.uint8), piece)
    return _by_hashlib(content, piece)


def _by_hashlib(content: memoryview | bytes, piece: int) -> bytes:
    view = memoryview(content)
    return b"".join(hashlib.sha256(view[at : at + piece]).digest() for at in range(0, len(view), piece))


_lock = threading.Lock()
_loaded: dict[Path, Lanes | None] = {}  # None: nothing to load, and no further try


def _find_lanes(*, build: bool) -> Lanes | None:
    vectors = _vectors()
    library = None if vectors is None else library_path(vectors)
    if vectors is None or library is None:
        return None
    with _lock:
        if library in _loaded:
            return _loaded[library]
        try:
            if library.exists():
                _loaded[library] = Lanes(library)
                return _loaded[library]
        except (OSError, AttributeError, ValueError) as error:
            logger.warning(f"{library} is not used: {error}")
            _loaded[library] = None
            return None
        if build:
            _loaded[library] = None
            threading.Thread(target=_build_beside, args=(vectors, library), name="build-sha256").start()
    return None


def _build_beside(vectors: str, library: Path) -> None:
    if build_library(vectors, library):
        with _lock:
            del _loaded[library]  # the next one to ask loads it


def build_library(vectors: str, library: Path) -> bool:
    """Compiles the library for these vectors; False where that is not possible."""
    compiler = machine_compiler()
    if compiler is None:
        return False
    scratch = library.with_name(f"{library.name}.{secrets.token_hex(4)}")
    command = [*compiler.command, *_FLAGS, *_VECTORS[vectors], "-o", str(scratch), str(_SOURCE)]
    try:
        make_private(library.parent)
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=compiler.variables(),
            timeout=_COMPILED_S,
        )  # fmt: skip
        if done.returncode == 0:
            scratch.rename(library)
            return True
        logger.info(f"{_SOURCE.name} cannot be compiled, hashlib is used: {done.stderr.strip()[-300:]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.info(f"{_SOURCE.name} cannot be compiled, hashlib is used: {error}")
    finally:
        scratch.unlink(missing_ok=True)
    return False


def library_path(vectors: str) -> Path:
    """Where the library for these vectors is kept; another source has another place."""
    return environment.home() / "native" / f"sha256-{_mark()}-{vectors}.so"


def supported_vectors() -> tuple[str, ...]:
    """The kinds of vectors of this processor that there is code for, the widest first."""
    flags = _processor_flags()
    return tuple(kind for kind in _VECTORS if _NEEDED[kind] <= flags)


@functools.cache
def _vectors() -> str | None:
    """Which vectors to use; None where hashlib is as fast: 8 lanes are slower than instructions for SHA, 16 are not."""
    widest = next(iter(supported_vectors()), None)
    return None if widest == "avx2" and "sha_ni" in _processor_flags() else widest


@functools.cache
def _processor_flags() -> frozenset[str]:
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as lines:
            found = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(found.partition(":")[2].split())


@functools.cache
def _mark() -> str:
    return hashlib.sha256(" ".join(_FLAGS).encode() + _SOURCE.read_bytes()).hexdigest()[:16]
