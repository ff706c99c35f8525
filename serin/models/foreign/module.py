"""Loads a user's network: `module: pkg.mod:Net`, or `module: net.py:Net` for a file beside the spec.

    Net(numeric: int, sizes: tuple[int, ...], outputs: int, **options) -> torch.nn.Module
    forward(num: float32[n, numeric], cat: int64[n, len(sizes)]) -> float32[n, outputs]

`sizes` has the number of codes of each categorical column, `options` are those of the spec. The answer is logits for a
classification and, for a regression, the value in standard units (mean 0, deviation 1): Serin converts it to the
target's unit. The network is tried on a few rows before a training begins. It may name submodules whose activations
`training.gradient_checkpointing` recomputes one by one: `stages = ("embed", "body", "head")`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from serin.errors import NetworkUnfit
from serin.models.shape import TableShape
from serin.models.table import AnswersInUnits
from serin.spec.model import ModelSpec

# Errors that a user's code may raise. Not all of them: memory errors and signals have their own meaning.
ANY_FAULT = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip
_TRIED_ROWS = 3


class OwnNetwork(AnswersInUnits):
    """The user's network, with the conversion to the target's unit."""

    def __init__(self, spec: ModelSpec, shape: TableShape) -> None:
        super().__init__(shape)
        assert spec.module is not None
        try:
            made = _find(spec.module)(
                numeric=shape.numeric, sizes=shape.sizes, outputs=shape.outputs, **spec.options
            )
        except ANY_FAULT as error:
            raise NetworkUnfit(module=spec.module, reason=f"{type(error).__name__}: {error}") from error
        if not isinstance(made, nn.Module):
            reason = f"returns a {type(made).__name__}, not a torch.nn.Module"
            raise NetworkUnfit(module=spec.module, reason=reason)
        self.network = made
        _try(self.network, spec.module, shape)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        return self.in_units(self.network(num, cat))

    def stages(self) -> list[nn.Module]:
        """Returns the submodules that the network names as its stages; the whole network when it names none."""
        names = getattr(self.network, "stages", None)
        if not isinstance(names, list | tuple) or not names:
            return [self.network]
        return [self.network.get_submodule(name) for name in names]


def _find(name: str) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        found: Callable[..., Any] = getattr(importlib.import_module(place), attribute)
        return found
    spec = importlib.util.spec_from_file_location(f"serin_own_{Path(place).stem}", place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    own: Callable[..., Any] = getattr(module, attribute)
    return own


def _try(network: nn.Module, name: str, shape: TableShape) -> None:
    num = torch.zeros(_TRIED_ROWS, shape.numeric)
    cat = torch.zeros(_TRIED_ROWS, len(shape.sizes), dtype=torch.int64)
    try:
        with torch.no_grad():
            answer = network.eval()(num, cat)
    except ANY_FAULT as error:
        reason = f"forward raises {type(error).__name__}: {error}"
        raise NetworkUnfit(module=name, reason=reason) from error
    finally:
        network.train()
    wanted = (_TRIED_ROWS, shape.outputs)
    if not isinstance(answer, Tensor) or tuple(answer.shape) != wanted or not answer.is_floating_point():
        found = f"{answer.dtype}{list(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
        reason = f"forward returns {found} for {_TRIED_ROWS} rows, expected float32{list(wanted)}"
        raise NetworkUnfit(module=name, reason=reason)
