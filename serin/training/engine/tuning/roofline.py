"""The roofline model: what a step computes and moves, and what the device can do at best.

Products are counted by torch as a row goes through the network; moved bytes are estimated from its outputs and weights.
The device's best rates are measured with one large product and one large copy, for a tenth of a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from serin.models.foreign.module import ANY_FAULT
from serin.models.shape import TableShape
from serin.models.table import CategoryTable
from serin.training.engine.precision import Precision, computing, matrix_products

WORTH_MEASURING_S = 1.0  # of work; less is not worth the tenth of a second

_ROWS = 2
_FORWARD_AND_BACK = 3  # the backward pass takes two products for each one of the forward pass
_TOUCHED = 4  # an output is written and read in the forward pass, and so is its gradient in the backward pass
_TOUCHED_WEIGHT = {"adamw": 10, "adagrad": 8, "sgd": 6}  # reads and writes of a number per step
_BYTES = 4
_SIDE = {"cpu": 768, "cuda": 8192}
_COPIED_BYTES = {"cpu": 2**26, "cuda": 2**30}
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The cost of a training step: products and moved bytes grow with the rows, and some bytes with the weights."""

    flops_per_row: float
    bytes_per_row: float
    bytes_per_step: float
    table_bytes_per_step: float  # of the category tables, where they are updated whole

    def of(self, rows: int, steps: int, *, by_row: bool) -> tuple[float, float]:
        """Returns (products, bytes) of so many rows in so many steps."""
        per_step = self.bytes_per_step + (0.0 if by_row else self.table_bytes_per_step)
        return rows * self.flops_per_row, rows * self.bytes_per_row + steps * per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    flops_per_s: float
    bytes_per_s: float


def weigh(network: nn.Module, shape: TableShape, *, optimizer: str) -> StepCost | None:
    """Measures the cost of a network; None if it fails on two rows, because its training will report the reason."""
    device = next((weight.device for weight in network.parameters()), torch.device("cpu"))
    num = torch.zeros(_ROWS, shape.numeric, device=device)
    cat = torch.zeros(_ROWS, len(shape.sizes), dtype=torch.int64, device=device)
    outputs = 0

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal outputs
        outputs += output.numel() if isinstance(output, Tensor) else 0

    leaves = [module for module in network.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(count) for module in leaves]
    was_training = network.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
            network.eval()
            network(num, cat)
    except ANY_FAULT:
        return None
    finally:
        network.train(was_training)
        for hook in hooks:
            hook.remove()
    tables = sum(module.weight.numel() for module in network.modules() if isinstance(module, CategoryTable))
    dense = sum(weight.numel() for weight in network.parameters()) - tables
    touched = _BYTES * _TOUCHED_WEIGHT.get(optimizer, 10)
    columns = shape.numeric + len(shape.sizes) + 1
    return StepCost(
        flops_per_row=_FORWARD_AND_BACK * counter.get_total_flops() / _ROWS,
        bytes_per_row=_BYTES * (_TOUCHED * outputs / _ROWS + 2 * columns),
        bytes_per_step=touched * dense,
        table_bytes_per_step=touched * tables,
    )


def measure_peaks(device: torch.device, precision: Precision) -> Peaks:
    """Returns the best rates of a few tries: one large product and one large copy, in this precision."""
    side, copied = _SIDE[device.type], _COPIED_BYTES[device.type]
    with torch.no_grad(), matrix_products(precision), computing(precision, device):
        a, b = (torch.ones(side, side, device=device) for _ in range(2))
        product_s = _best_s(lambda: torch.mm(a, b), device)
        source = torch.ones(copied // _BYTES, device=device)
        target = torch.empty_like(source)
        copy_s = _best_s(lambda: target.copy_(source), device)
    return Peaks(flops_per_s=2 * side**3 / product_s, bytes_per_s=2 * copied / copy_s)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
