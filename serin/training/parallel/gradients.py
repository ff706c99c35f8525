"""The loss of a step, the mean over its rows, weighted by class where the spec says so; and what is done to its
gradients before the update, all on the device: mean over the ranks, unscaling, finiteness check, clipping.

Ranks may have the same gradients or shards of them (DTensors): a norm is over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from serin.formats.schema import Task
from serin.spec.training import Strategy
from serin.training.parallel.dtensors import local, sharded
from serin.training.parallel.ranks import Ranks

_FIRST_SCALE = 2.0**16
_STEPS_UNTIL_DOUBLED = 1000
_BUCKET_BYTES = 2**28  # of gradients that are averaged in one message
Loss = Callable[[Tensor, Tensor], Tensor]


class GradientMean:
    """Averages the gradients of ranks that each hold the whole network, after the backward pass.

    The places of gradients in a message never change, so neither does the order in which gloo adds them: a resumed run
    ends with the same weights.
    """

    def __init__(self, network: nn.Module, world: Ranks) -> None:
        self._weights = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
        self._world = world
        self._used: set[str] = set()
        self._buckets: list[list[nn.Parameter]] = []

    @torch.no_grad()
    def __call__(self) -> None:
        if not self._buckets:
            self._agree()
        late = [name for name in self._weights.keys() - self._used if self._weights[name].grad is not None]
        if late:  # other ranks do not know
            raise RuntimeError(
                f"{min(late)} has a gradient that it did not have in the first step; with several processes every step"
                " must use the same weights"
            )
        for bucket in self._buckets:
            found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in bucket]
            together = torch.cat([gradient.reshape(-1) for gradient in found])
            if self._world.through_host:  # gloo knows no mean
                dist.all_reduce(together)
                together.div_(self._world.size)
            else:
                dist.all_reduce(together, op=dist.ReduceOp.AVG)
            pieces = torch.split(together, [weight.numel() for weight in bucket])
            for weight, gradient, piece in zip(bucket, found, pieces, strict=True):
                mean = piece.view_as(weight)  # an update wants it in the weight's order in memory
                weight.grad = mean if weight.is_contiguous() else gradient.copy_(mean)

    def _agree(self) -> None:
        """Finds the weights that the first step has used on any rank, and divides them into messages."""
        flags = self._world.agree([int(weight.grad is not None) for weight in self._weights.values()])
        used = [name for name, flag in zip(self._weights, flags, strict=True) if flag]
        size, kind = 0, None
        for weight in (self._weights[name] for name in used):
            size += weight.nbytes
            if not self._buckets or size > _BUCKET_BYTES or weight.dtype != kind:
                self._buckets.append([])
                size, kind = weight.nbytes, weight.dtype
            self._buckets[-1].append(weight)
        self._used = set(used)


class LossScale:
    """Keeps fp16 gradients in range: the loss is multiplied, gradients are divided again.

    A step whose gradients are not finite is skipped and the factor halved; after a thousand good ones it is doubled.
    """

    def __init__(self, world: Ranks, strategy: Strategy) -> None:
        self._apart = strategy != "ddp" and world.size > 1
        self.factor = torch.empty((), device=world.device)
        self._good = torch.zeros((), dtype=torch.int32, device=world.device)
        self.overflow = torch.zeros((), device=world.device)  # 1.0: the last gradients were not finite
        self.reset()

    def reset(self) -> None:
        self.factor.fill_(_FIRST_SCALE)
        self._good.zero_()

    @torch.no_grad()
    def take_back(self, gradients: Sequence[Tensor]) -> None:
        """Divides in place. All gradients become zero when one of any rank is not finite."""
        mine = [local(gradient) for gradient in gradients]
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(mine)])  # noqa: SLF001
        self.overflow.copy_(~torch.isfinite(norms.sum()))
        if self._apart:
            dist.all_reduce(self.overflow, op=dist.ReduceOp.MAX)
        bad = self.overflow.bool()
        for gradient in mine:
            gradient.div_(self.factor).masked_fill_(bad, 0.0)
        self._good.add_(1).masked_fill_(bad, 0)
        grown = self._good >= _STEPS_UNTIL_DOUBLED
        self.factor.mul_(torch.where(bad, 0.5, torch.where(grown, 2.0, 1.0)))
        self._good.masked_fill_(grown, 0)

    def state(self) -> dict[str, Tensor]:
        return {"factor": self.factor, "good": self._good}


@torch.no_grad()
def clip_gradients(weights: Iterable[nn.Parameter], limit: float, world: Ranks, strategy: Strategy) -> None:
    """Scales all gradients together so that their norm is at most `limit`."""
    if strategy in ("ddp", "fsdp") or not world.group:
        nn.utils.clip_grad_norm_(weights, limit)
        return
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    apart = torch.zeros((), device=world.device)  # squares of what other ranks do not have ...
    same = torch.zeros((), device=world.device)  # ... and of what they all have
    for gradient in gradients:
        square = local(gradient).float().square().sum()
        if sharded(gradient):
            apart += square
        else:
            same += square
    dist.all_reduce(apart)
    factor = (limit / ((apart + same).sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(factor)


def loss_of(task: Task, *, scale: Tensor | None = None, weights: Tensor | None = None) -> Loss:
    """Returns (logits float[n, outputs], target float[n], or [n, k] of several) -> scalar. `scale`: a regression's
    unit.

    For logits float[n, members, outputs] it is the mean over the members, each by itself.
    """
    return _of_each_member(_loss_of(task, scale, weights))


def _of_each_member(loss: Loss) -> Loss:
    def mean(answers: Tensor, target: Tensor) -> Tensor:
        if answers.dim() < 3:
            return loss(answers, target)
        same = target.unsqueeze(1).expand(-1, answers.shape[1], *target.shape[1:])
        return loss(answers.flatten(0, 1), same.flatten(0, 1))

    return mean


def _loss_of(task: Task, scale: Tensor | None, weights: Tensor | None) -> Loss:
    match task:
        case "binary":
            return _weighted(_binary, weights)
        case "multiclass":
            return _weighted(_multiclass, weights)
        case "regression":  # in standard units, so that the learning rate does not depend on the target's
            unit = torch.ones(()) if scale is None else scale
            return lambda values, target: functional.mse_loss(
                _like(values, target).float() / unit, target / unit
            )


def _like(answers: Tensor, target: Tensor) -> Tensor:
    """Shapes the target like the answers: one column per target; without columns where there is one target."""
    return answers[:, 0] if target.dim() == 1 else answers


def _weighted(each: Callable[[Tensor, Tensor, str], Tensor], weights: Tensor | None) -> Loss:
    if weights is None:
        return lambda logits, target: each(logits, target, "mean")
    return lambda logits, target: (each(logits, target, "none") * weights[target.long()]).mean()


def _binary(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    answers = _like(logits, target).float()
    return functional.binary_cross_entropy_with_logits(answers, target, reduction=reduction)


def _multiclass(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(logits.float(), target.long(), reduction=reduction)
