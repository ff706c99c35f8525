"""Updates the weights: AdamW, SGD or Adagrad over all of them, and row by row in large category tables.

A dense Adam reads and writes the whole table and its two moments at every step, however few rows a step has used.
Nothing here waits for the device, and on a GPU all of it can be captured: rates and counts are stored there.

The kernels are torch's fused ones, called with the arguments that torch.optim gives them, so the weights are the same,
bit by bit. torch.optim itself imports a compiler at its first use, which takes longer than many trainings, and its
bookkeeping (hooks, profiler ranges, grouping tensors by device) takes a tenth of a small network's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from serin.models.table import CategoryTable
from serin.spec.training import Strategy, TrainingSpec
from serin.training.parallel.dtensors import distributed, fill, full
from serin.training.parallel.gradients import LossScale, clip_gradients
from serin.training.parallel.ranks import Ranks

_MOMENTUM = 0.9
_BETAS = (0.9, 0.999)
_SMALL = 1e-8
_STEP = "step"
_STATE = {"adamw": (_STEP, "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "adagrad": ("sum",)}
# Adagrad's steps shrink as a row is seen again, so its first is this much longer than AdamW's.
_ROW_RATE = 10.0
_ROWS_WORTH_IT = 100_000
_TIMES_A_STEP = 4


def by_row_pays(table_rows: int, codes_per_step: int) -> bool:
    """Returns whether a table is so large that a step touches only a small part of it. Pure."""
    return table_rows >= _ROWS_WORTH_IT and table_rows > _TIMES_A_STEP * codes_per_step


def category_tables(network: nn.Module) -> list[CategoryTable]:
    return [module for module in network.modules() if isinstance(module, CategoryTable)]


class Optimizer:
    """The optimizer of a run. Create it before the network is parallelized, since it may take tables out of it."""

    def __init__(
        self,
        network: nn.Module,
        training: TrainingSpec,
        world: Ranks,
        *,
        by_row: bool,
        strategy: Strategy = "ddp",
    ) -> None:
        self._clip_norm = training.clip_norm
        self._world, self._strategy = world, strategy
        self._tables = category_tables(network) if by_row else []
        for table in self._tables:
            table.by_row()
        self._sums = [torch.zeros(len(table.weight), device=world.device) for table in self._tables]
        on_gpu = world.device.type == "cuda"
        # In a captured step the rate must be a tensor: a number would be captured too.
        self._rate: Tensor | float = torch.tensor(0.0, device=world.device) if on_gpu else 0.0
        self._last_rate: float | None = None
        self.scale: LossScale | None = None
        self._weights: dict[str, nn.Parameter] = {}
        self._training = training
        self._groups: list[_Group] = []

    def begin(self, network: nn.Module) -> None:
        """Takes the weights of this rank; call it after parallelization, which replaces the tensors."""
        self._weights = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
        groups: dict[tuple[bool, bool], dict[str, nn.Parameter]] = {}
        for name, weight in self._weights.items():  # biases are not decayed; DTensors form a separate group
            groups.setdefault((weight.ndim > 1, distributed(weight)), {})[name] = weight
        decay = self._training.weight_decay
        self._groups = [
            _Group.at_zero(groups[key], decay if key[0] else 0.0, _STATE[self._training.optimizer])
            for key in sorted(groups, reverse=True)
        ]

    def set_rate(self, rate: float) -> None:
        if rate == self._last_rate:
            return
        self._last_rate = rate
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
        else:
            self._rate = rate

    def copy_rate(self, rate: Tensor) -> None:
        """Sets the rate from a tensor that is already on the device."""
        assert isinstance(self._rate, Tensor)
        self._rate.copy_(rate)
        self._last_rate = None

    def scale_losses(self, scaled: bool) -> None:
        """Enables loss scaling, for fp16."""
        self.scale = LossScale(self._world, self._strategy) if scaled else None

    def clear(self) -> None:
        for weight in self._weights.values():
            weight.grad = None
        for table in self._tables:
            assert table.touched is not None
            table.touched.clear()

    def apply(self) -> None:
        """Makes one update from the present gradients."""
        if self.scale is not None:
            self.scale.take_back(list(self._gradients()))
        if self._clip_norm is not None:
            clip_gradients(self._weights.values(), self._clip_norm, self._world, self._strategy)
        overflow = self.scale.overflow if self.scale is not None else None
        for group in self._groups:
            used = group.with_gradients()
            gradients = [weight.grad for weight in used.weights if weight.grad is not None]
            if gradients:
                _update(self._training.optimizer, used, gradients, self._rate, overflow)
        for table, sums in zip(self._tables, self._sums, strict=True):
            _update_rows(table, sums, self._rate, self._world)

    def state(self) -> dict[str, Tensor]:
        """Returns everything that the next update of this rank's weights depends on, whole, by name. All ranks must
        call it."""
        return {name: full(tensor) for name, tensor in self._state()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the result of `state`, for all weights, into the same tensors that a captured step uses."""
        for name, tensor in self._state():
            if name in tensors:  # absent: a loss scale, when the run used another precision before
                fill(tensor, tensors[name])

    def forget(self) -> None:
        """Resets the state as if there had been no update."""
        for group in self._groups:
            for _, tensor in group.state():
                tensor.zero_()
        for sums in self._sums:
            sums.zero_()
        if self.scale is not None:
            self.scale.reset()

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for group in self._groups:
            yield from group.state()
        yield from ((f"rows.{number}", sums) for number, sums in enumerate(self._sums))
        if self.scale is not None:
            yield from ((f"scale.{name}", value) for name, value in self.scale.state().items())

    def _gradients(self) -> Iterable[Tensor]:
        yield from (weight.grad for weight in self._weights.values() if weight.grad is not None)
        for table in self._tables:
            yield from (leaf.grad for _, leaf in table.touched or () if leaf.grad is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Weights that one kernel updates, and their `kept` tensors by name: lists in the order of the weights."""

    names: list[str]
    weights: list[nn.Parameter]
    decay: float
    kept: dict[str, list[Tensor]]

    @classmethod
    def at_zero(cls, weights: Mapping[str, nn.Parameter], decay: float, kept: Iterable[str]) -> _Group:
        return cls(
            names=list(weights),
            weights=list(weights.values()),
            decay=decay,
            kept={
                what: [
                    torch.zeros((), device=weight.device) if what == _STEP else torch.zeros_like(weight)
                    for weight in weights.values()
                ]
                for what in kept
            },
        )

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for what, tensors in self.kept.items():
            yield from ((f"{name}.{what}", tensor) for name, tensor in zip(self.names, tensors, strict=True))

    def with_gradients(self) -> _Group:
        """Returns the weights that the step has used; others are neither decayed nor counted."""
        used = [number for number, weight in enumerate(self.weights) if weight.grad is not None]
        if len(used) == len(self.weights):
            return self
        return _Group(
            names=[self.names[number] for number in used],
            weights=[self.weights[number] for number in used],
            decay=self.decay,
            kept={what: [tensors[number] for number in used] for what, tensors in self.kept.items()},
        )


@torch.no_grad()
def _update(
    rule: str, group: _Group, gradients: list[Tensor], rate: Tensor | float, overflow: Tensor | None
) -> None:
    """Makes one update of a group. With `overflow` above zero AdamW and SGD change nothing; Adagrad adds zeros then."""
    weights: list[Tensor] = list(group.weights)
    lr: Any = rate  # each of these kernels takes a number or a tensor; their annotations name one of the two
    match rule:
        case "adamw":
            steps = group.kept[_STEP]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(  # torch has no public name for it
                weights, gradients, group.kept["exp_avg"], group.kept["exp_avg_sq"], [], steps,
                lr=lr, beta1=_BETAS[0], beta2=_BETAS[1], weight_decay=group.decay, eps=_SMALL,
                amsgrad=False, maximize=False, grad_scale=None, found_inf=overflow,
            )  # fmt: skip
            if overflow is not None:
                torch._foreach_sub_(steps, [overflow] * len(steps))
        case "sgd":
            torch._fused_sgd_(
                weights, gradients, group.kept["momentum_buffer"],
                lr=lr, weight_decay=group.decay, momentum=_MOMENTUM, dampening=0.0, nesterov=False,
                maximize=False, is_first_step=False, grad_scale=None, found_inf=overflow,
            )  # fmt: skip
        case "adagrad":  # torch's cannot be captured in a CUDA graph
            for weight, total, given in zip(weights, group.kept["sum"], gradients, strict=True):
                gradient = given.add(weight, alpha=group.decay)
                total.addcmul_(gradient, gradient)
                weight.sub_(gradient.mul_(rate).div_(total.sqrt().add_(_SMALL)))


@torch.no_grad()
def _update_rows(table: CategoryTable, sums: Tensor, rate: Tensor | float, world: Ranks) -> None:
    """Applies Adagrad with one sum per row.

    Gradients of rows that were used several times are added up by sorting, without asking the device how many distinct
    rows there are; unused entries at the end add nothing to row 0.
    """
    assert table.touched is not None
    rows = torch.cat([rows.flatten() for rows, _ in table.touched])
    gradients = torch.cat([leaf.grad.flatten(0, -2) for _, leaf in table.touched if leaf.grad is not None])
    table.touched.clear()
    rows, gradients = world.join(rows), world.join(gradients.float()) / world.size
    ordered, order = rows.sort(stable=True)
    begins = torch.ones_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1]
    slot = begins.cumsum(0) - 1
    total = torch.zeros_like(gradients).index_add_(0, slot, gradients[order])
    distinct = torch.zeros_like(rows).scatter_(0, slot, ordered)
    sums.index_add_(0, distinct, total.square().mean(dim=1))
    length = _ROW_RATE * rate / (sums[distinct].sqrt() + _SMALL)
    table.weight.index_add_(0, distinct, (-total * length[:, None]).to(table.weight.dtype))
