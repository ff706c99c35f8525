"""Measures how fast host memory reaches the first GPU; `python -m serin.stack.doctor.pinned_bandwidth` prints JSON."""

from __future__ import annotations

import json
import sys

_BYTES = 2**28
_REPEATS = 5


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU")
    target = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    rates = {}
    for kind, pinned in (("pinned_gb_s", True), ("pageable_gb_s", False)):
        source = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=pinned)
        source.fill_(1)
        best_ms = float("inf")
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best_ms = min(best_ms, begin.elapsed_time(end))
        rates[kind] = _BYTES / best_ms / 1e6
    sys.stdout.write(json.dumps(rates) + "\n")


if __name__ == "__main__":
    main()
