"""Updates the weights: AdamW, SGD or Adagrad over all of them, and row by row in large category tables.

A dense Adam reads and writes the whole table and its two moments at every step, however few rows a step has used.
Nothing here waits for the device, and on a GPU all of it can be captured: rates and counts are stored there.
"""

from __future__ import annotations

from collections.abc import Iterable
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
_SMALL = 1e-8
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
        self._optimizer: torch.optim.Optimizer | None = None

    def begin(self, network: nn.Module) -> None:
        """Takes the weights of this rank; call it after parallelization, which replaces the tensors."""
        self._weights = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for weight in self._weights.values():  # biases are not decayed; DTensors form a separate group
            groups.setdefault((weight.ndim > 1, distributed(weight)), []).append(weight)
        self._optimizer = _optimizer(
            [
                {"params": groups[key], "weight_decay": self._training.weight_decay if key[0] else 0.0}
                for key in sorted(groups, reverse=True)
            ],
            self._training,
            self._rate,
        )

    def set_rate(self, rate: float) -> None:
        if rate == self._last_rate:
            return
        self._last_rate = rate
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
            return
        self._rate = rate
        for group in self._inner.param_groups:
            group["lr"] = rate

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
            # The fused optimizers skip a step when a flag on the device says so; others add zeros.
            self._inner.found_inf = self.scale.overflow  # type: ignore[attr-defined]
        if self._clip_norm is not None:
            clip_gradients(self._weights.values(), self._clip_norm, self._world, self._strategy)
        if self.scale is None and isinstance(self._inner, DirectAdamW):
            self._inner.update()
        else:
            self._inner.step()
        for table, sums in zip(self._tables, self._sums, strict=True):
            _update_rows(table, sums, self._rate, self._world)

    def state(self) -> dict[str, Tensor]:
        """Returns everything that the next update of this rank's weights depends on, whole, by name. All ranks must
        call it."""
        found = {
            f"{name}.{what}": full(value)
            for name, weight in self._weights.items()
            for what, value in self._inner.state[weight].items()
            if isinstance(value, Tensor)
        }
        found |= {f"rows.{number}": sums for number, sums in enumerate(self._sums)}
        return found | {
            f"scale.{name}": value for name, value in (self.scale.state() if self.scale else {}).items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Loads the result of `state`, for all weights, into the same tensors that a captured step uses."""
        if not any(self._inner.state.values()):
            self._make_state()
        targets = {
            f"{name}.{what}": value
            for name, weight in self._weights.items()
            for what, value in self._inner.state[weight].items()
        }
        targets |= {f"rows.{number}": sums for number, sums in enumerate(self._sums)}
        targets |= {
            f"scale.{name}": value for name, value in (self.scale.state() if self.scale else {}).items()
        }
        for name, target in targets.items():
            if name in tensors:  # absent: a loss scale, when the run used another precision before
                fill(target, tensors[name])

    def forget(self) -> None:
        """Resets the state as if there had been no update."""
        for values in (*self._inner.state.values(), dict(enumerate(self._sums))):
            for value in values.values():
                if isinstance(value, Tensor):
                    value.zero_()
        if self.scale is not None:
            self.scale.reset()

    @property
    def _inner(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "call begin() first"
        return self._optimizer

    def _gradients(self) -> Iterable[Tensor]:
        yield from (weight.grad for weight in self._weights.values() if weight.grad is not None)
        for table in self._tables:
            yield from (leaf.grad for _, leaf in table.touched or () if leaf.grad is not None)

    def _make_state(self) -> None:
        """Makes an update with zero gradients, so that there is a state to fill."""
        for weight in self._weights.values():
            weight.grad = torch.zeros_like(weight)
        self.set_rate(0.0)
        self._inner.step()
        self.clear()
        self.forget()


class Adagrad(torch.optim.Optimizer):
    """Adagrad that can be captured in a CUDA graph, unlike torch's."""

    def __init__(self, groups: Any, lr: Tensor | float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["sum"] = torch.zeros_like(weight)
            for weight in weights:
                gradient = weight.grad.add(weight, alpha=group["weight_decay"])
                total = self.state[weight]["sum"].addcmul_(gradient, gradient)
                weight.sub_(gradient.mul_(group["lr"]).div_(total.sqrt().add_(_SMALL)))


def _optimizer(groups: list[Any], training: TrainingSpec, rate: Tensor | float) -> torch.optim.Optimizer:
    shared = any(distributed(weight) for group in groups for weight in group["params"])
    match training.optimizer:
        case "adamw" if not isinstance(rate, Tensor) and not shared:
            return DirectAdamW(groups, lr=rate)
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, fused=True, capturable=isinstance(rate, Tensor))
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=_MOMENTUM, fused=True)
        case "adagrad":
            return Adagrad(groups, lr=rate)


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


# Most of that bookkeeping (hooks, profiler ranges, grouping tensors by device, collecting the state) repeats the same
# answer at every step. In a small network it takes a tenth of the step. The kernel and its arguments are the same,
# and so are the weights, bit by bit.
@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One group's tensors, in the order of its weights. `steps`: those of all weights in one tensor."""

    settings: dict[str, Any]
    weights: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: Tensor
    step_of_each: list[Tensor]


class DirectAdamW(torch.optim.AdamW):
    def __init__(self, groups: list[Any], lr: float) -> None:
        super().__init__(groups, lr=lr, fused=True)
        self._ready: list[_Group] | None = None

    def update(self) -> None:
        """Does what `step` does. The first one makes the state; one without all gradients is left to torch."""
        if self._ready is None:
            self.step()
            if all(self.state.get(weight) for group in self.param_groups for weight in group["params"]):
                self._ready = [self._collect(group) for group in self.param_groups]
            return
        gradients = [[weight.grad for weight in group.weights] for group in self._ready]
        if any(gradient is None for each in gradients for gradient in each):
            self.step()
            return
        with torch.no_grad():
            for group, each in zip(self._ready, gradients, strict=True):
                _update(group, each)

    def _collect(self, group: dict[str, Any]) -> _Group:
        weights, states = group["params"], [self.state[weight] for weight in group["params"]]
        steps = torch.stack([state["step"] for state in states])
        for state, step in zip(states, steps.unbind(), strict=True):
            state["step"] = step  # a view: one addition counts for all
        return _Group(
            settings=group,
            weights=weights,
            means=[state["exp_avg"] for state in states],
            squares=[state["exp_avg_sq"] for state in states],
            steps=steps,
            step_of_each=[state["step"] for state in states],
        )


def _update(group: _Group, gradients: list[Any]) -> None:
    group.steps.add_(1)
    settings = group.settings
    beta1, beta2 = settings["betas"]
    torch._fused_adamw_(  # torch has no public name for it
        group.weights, gradients, group.means, group.squares, [], group.step_of_each,
        amsgrad=False, lr=settings["lr"], beta1=beta1, beta2=beta2, weight_decay=settings["weight_decay"],
        eps=settings["eps"], maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip
