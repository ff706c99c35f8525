"""Imports the libraries of all stages: python -m benchmarks.orchestration.libraries.

A process that imports them later finds their files in the page cache.
"""

from __future__ import annotations

import importlib

_LIBRARIES = (
    "flows.pipeline",
    "flows.placed",
    "flows.stages",
    "serin.etl.build",
    "torch",
    "torch.onnx",
    "onnxscript",
)


def main() -> None:
    for name in _LIBRARIES:
        importlib.import_module(name)


if __name__ == "__main__":
    main()
