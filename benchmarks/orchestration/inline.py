"""Runs the flow in this process against a running server: python -m benchmarks.orchestration.inline SPEC.

The last line gives the seconds of the flow itself, without process start-up.
"""

from __future__ import annotations

import asyncio
import sys
import time

from flows.pipeline import pipeline


def main() -> None:
    began = time.perf_counter()
    asyncio.run(pipeline(sys.argv[1], serve=False))
    print(f"{time.perf_counter() - began:.3f}")


if __name__ == "__main__":
    main()
