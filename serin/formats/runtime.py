"""How ONNX Runtime is to run a bundle's graph, as the export measured it: the section `runtime` of gate.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from serin.errors import BundleBroken

GATE = "gate.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """`threads`: for one run. `mix_us`: for each number of threads tried, the mean time of a request. `spread`: how far
    a golden row's score moved with the size of its batch, at most; 8-bit layers round otherwise in other company."""

    threads: int = 1
    mix_us: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0


def read_runtime(bundle: Path) -> Runtime:
    """What the bundle says; one thread when it says nothing."""
    path = bundle / GATE
    if not path.is_file():
        return Runtime()
    try:
        section = json.loads(path.read_text(encoding="utf-8")).get("runtime") or {}
        threads = section.get("threads", 1)
        if not isinstance(threads, int) or threads < 1:
            raise ValueError(f"{threads!r} is no number of threads")
        spread = float(section.get("spread", 0.0))
        return Runtime(threads=threads, mix_us=dict(section.get("mix_us", {})), spread=spread)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error
