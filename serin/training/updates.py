"""How a step changes the weights: AdamW, SGD or Adagrad over all of them, and row by row in large category tables.

A dense Adam reads and writes the whole table and its two moments at every step, however few rows a step has used.
Nothing here waits for the device, and on a GPU all of it can be captured: rates and counts live there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from serin.models.table import CategoryTable
from serin.spec.stages import TrainingSpec
from serin.training.full import fill, full
from serin.training.world import World

_MOMENTUM = 0.9
_SMALL = 1e-8
_ROW_RATE = 10.0  # Adagrad's steps shrink as a row is seen again; its first is so much longer than AdamW's
_ROWS_WORTH_IT = 100_000
_TIMES_A_STEP = 4


def by_row_pays(table_rows: int, codes_per_step: int) -> bool:
    """Is a table so large that a step touches only a small part of it? Pure."""
    return table_rows >= _ROWS_WORTH_IT and table_rows > _TIMES_A_STEP * codes_per_step


def category_tables(network: nn.Module) -> list[CategoryTable]:
    return [module for module in network.modules() if isinstance(module, CategoryTable)]


class Updates:
    """The optimizer of a run. Made after the network is on its device, and before it is wrapped for several ranks."""

    def __init__(self, network: nn.Module, training: TrainingSpec, world: World, *, by_row: bool) -> None:
        self._clip_norm = training.clip_norm
        self._world = world
        self._tables = category_tables(network) if by_row else []
        for table in self._tables:
            table.by_row()
        self._sums = [torch.zeros(len(table.weight), device=world.device) for table in self._tables]
        on_gpu = world.device.type == "cuda"
        # Where a step is captured its rate must be a tensor there: numbers would be captured too.
        self._rate: Tensor | float = torch.tensor(0.0, device=world.device) if on_gpu else 0.0
        self.weights: list[nn.Parameter] = []
        self._training = training
        self._optimizer: torch.optim.Optimizer | None = None

    def begin(self, network: nn.Module) -> None:
        """Takes hold of the weights; after the network was sharded, since that makes other tensors of them."""
        self.weights = [weight for weight in network.parameters() if weight.requires_grad]
        matrices = [weight for weight in self.weights if weight.ndim > 1]
        others = [weight for weight in self.weights if weight.ndim <= 1]  # decay means nothing for biases
        groups = [
            {"params": matrices, "weight_decay": self._training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = _optimizer(
            [group for group in groups if group["params"]], self._training, self._rate
        )

    def set_rate(self, rate: float) -> None:
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
            return
        self._rate = rate
        for group in self._inner.param_groups:
            group["lr"] = rate

    def clear(self) -> None:
        self._inner.zero_grad(set_to_none=True)
        for table in self._tables:
            assert table.touched is not None
            table.touched.clear()

    def apply(self) -> None:
        """One update from the gradients that are there."""
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self.weights, self._clip_norm)
        self._inner.step()
        for table, sums in zip(self._tables, self._sums, strict=True):
            _update_rows(table, sums, self._rate, self._world)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next update depends on, whole, by name. All ranks must ask."""
        inner = {
            f"{number}.{name}": full(value)
            for number, values in self._inner.state_dict()["state"].items()
            for name, value in values.items()
        }
        return inner | {f"rows.{number}": sums for number, sums in enumerate(self._sums)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """As `state` gave it, into the same tensors that a captured step uses."""
        if not self._inner.state:
            self._make_state()
        numbered = dict(enumerate(weight for group in self._inner.param_groups for weight in group["params"]))
        for name, value in tensors.items():
            number, _, what = name.partition(".")
            target = (
                self._sums[int(what)] if number == "rows" else self._inner.state[numbered[int(number)]][what]
            )
            fill(target, value)

    def forget(self) -> None:
        """As if there had been no update."""
        for tensor in self._tensors():
            tensor.zero_()

    @property
    def _inner(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "begin() comes first"
        return self._optimizer

    def _make_state(self) -> None:
        """An update of nothing, so that there is a state to fill."""
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        self.set_rate(0.0)
        self._inner.step()
        self.clear()
        self.forget()

    def _tensors(self) -> Iterable[Tensor]:
        for values in self._inner.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))
        yield from self._sums


class Adagrad(torch.optim.Optimizer):
    """Adagrad that can be captured, which torch's cannot."""

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
    match training.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, fused=True, capturable=isinstance(rate, Tensor))
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=_MOMENTUM, fused=True)
        case "adagrad":
            return Adagrad(groups, lr=rate)


@torch.no_grad()
def _update_rows(table: CategoryTable, sums: Tensor, rate: Tensor | float, world: World) -> None:
    """Adagrad with one sum per row. Rows that were used several times are added up by sorting, without asking the
    device how many distinct ones there are: what is left over at the end adds nothing to row 0."""
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
