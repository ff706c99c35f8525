"""The machine's C++ compiler, for the native parts that are built where they run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from serin.machine import environment

_ON_PATH = ("c++", "g++", "clang++")


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
