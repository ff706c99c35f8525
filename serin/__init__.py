"""Raw tables to a served, proven model.

>>> import serin
>>> pipeline = serin.Pipeline.draft(frame, target="arr_delay > 15")  # doctest: +SKIP
>>> dataset, checkpoint = pipeline.build_dataset(), pipeline.train()  # doctest: +SKIP
>>> pipeline.export().predict(frame)  # doctest: +SKIP

Names are loaded when they are first used: the import itself loads nothing else. All error classes are in
`serin.errors`; the ones offered here are the roots of its families.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serin.api.explanation import Explanation
    from serin.api.model import Checkpoint, Dataset, Model
    from serin.api.pipeline import Pipeline
    from serin.errors import (
        DataError,
        ExportError,
        RolloutError,
        SerinError,
        ServingError,
        SpecError,
        StackError,
        StoreError,
        TrainingError,
    )
    from serin.serving.client.client import Client
    from serin.store.store import Store

    __version__: str

__all__ = [
    "Checkpoint",
    "Client",
    "DataError",
    "Dataset",
    "Explanation",
    "ExportError",
    "Model",
    "Pipeline",
    "RolloutError",
    "SerinError",
    "ServingError",
    "SpecError",
    "StackError",
    "Store",
    "StoreError",
    "TrainingError",
    "__version__",
]

_MODULES = {
    "Checkpoint": "serin.api.model",
    "Client": "serin.serving.client.client",
    "Dataset": "serin.api.model",
    "Explanation": "serin.api.explanation",
    "Model": "serin.api.model",
    "Pipeline": "serin.api.pipeline",
    "Store": "serin.store.store",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'serin' has no attribute {name!r}; it offers {', '.join(__all__)}")
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("serin")
    else:
        value = getattr(importlib.import_module(_MODULES.get(name, "serin.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
