"""Integrated gradients (Sundararajan et al., 2017) for networks of numbers and categories.

The path goes from the baseline to the row in a straight line, for numbers as they are and for categories between the
vectors that embedding layers give. A network with ReLU has kinks on that line, where no fixed number of steps is
exact: an interval whose parts do not add up to the difference of the network's answers at its ends is split, so the
contributions of a row add up to its answer minus the baseline's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from serin.formats.wire import Array
from serin.scoring.explain.explanation import Parts, Unexplained

_NODES = 4  # of Gauss and Legendre in an interval: exact for polynomials of degree 7
_FIRST_INTERVALS = 4
_ROUNDS = 40  # of splitting
_POINTS = 16_384  # points on the path that go through the network at once
_SAME = 2e-7  # of an interval's parts and the difference at its ends, relative where that is large
Hook = Callable[[nn.Module, Any, Tensor], Tensor | None]


def integrated_gradients(
    network: nn.Module, num: Array, cat: Array, baseline_num: Array, baseline_cat: Array
) -> Parts:
    """Returns the parts of each row's margin; the base is the network's answer for the baseline. The network must be in
    float64 and in evaluation mode. Unexplained when it reads categories other than through nn.Embedding."""
    with _straight_line(network, num, cat, baseline_num, baseline_cat) as line:
        return _integrate(line, len(num))


@dataclass(slots=True)
class _Line:
    """Points between the baseline and each row: `start` and `step` of the numbers, then of the vectors of each call of
    an embedding layer in `calls`. `owners`: which categorical column each of those vectors belongs to."""

    network: nn.Module
    cat: Tensor
    start: list[Tensor]
    step: list[Tensor]
    calls: list[int]
    owners: list[Tensor]
    given: dict[int, Tensor]
    called: int = 0

    def _forward(self, rows: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The answers at the point `at` of each row's line, and the inputs they depend on."""
        inputs = []
        for start, step in zip(self.start, self.step, strict=True):
            share = at.reshape(-1, *[1] * (step.ndim - 1))
            inputs.append((start + share * step[rows]).requires_grad_(torch.is_grad_enabled()))
        self.given, self.called = dict(zip(self.calls, inputs[1:], strict=True)), 0
        return self.network(inputs[0], self.cat[rows]), inputs

    def replace(self, _layer: nn.Module, _codes: Any, _vectors: Tensor) -> Tensor | None:
        """Gives the vectors on the line instead of those of the row; None leaves a call as it is."""
        self.called += 1
        return self.given.get(self.called - 1)

    def answers(self, rows: Array, at: Array) -> Array:
        """float64[points, outputs]."""
        found = []
        with torch.no_grad():
            for some, there in _portions(rows, at):
                found.append(self._forward(some, there)[0].numpy())
        return np.concatenate(found)

    def slopes(self, rows: Array, at: Array) -> Array:
        """How fast the answers change along the line, by feature: float64[points, outputs, features]."""
        found = []
        for some, there in _portions(rows, at):
            answer, inputs = self._forward(some, there)
            each = []
            for output in range(answer.shape[1]):
                gradients = torch.autograd.grad(
                    answer[:, output].sum(), inputs, retain_graph=True, materialize_grads=True
                )
                parts = [gradients[0] * self.step[0][some]]
                codes = torch.zeros(len(some), self.cat.shape[1], dtype=torch.float64)
                for gradient, step, owner in zip(gradients[1:], self.step[1:], self.owners, strict=True):
                    codes += (gradient * step[some]).sum(dim=-1).reshape(len(some), -1) @ owner
                parts.append(codes)
                each.append(torch.cat(parts, dim=1))
            found.append(torch.stack(each, dim=1).numpy())
        return np.concatenate(found)


def _portions(rows: Array, at: Array) -> Iterator[tuple[Tensor, Tensor]]:
    for begin in range(0, len(rows), _POINTS):
        part = slice(begin, begin + _POINTS)
        yield torch.from_numpy(rows[part]), torch.from_numpy(at[part])


@contextmanager
def _straight_line(
    network: nn.Module, num: Array, cat: Array, baseline_num: Array, baseline_cat: Array
) -> Iterator[_Line]:
    """The line, with the embedding layers of the network giving points on it instead of vectors of theirs."""
    codes = torch.from_numpy(np.ascontiguousarray(cat, dtype=np.int64))
    numbers = torch.from_numpy(np.ascontiguousarray(num, dtype=np.float64))
    first = torch.from_numpy(np.asarray(baseline_num, np.float64))
    first_codes = torch.from_numpy(np.asarray(baseline_cat, np.int64))
    owners = find_owners(network, numbers, codes, first_codes)
    calls = [place for place, owner in enumerate(owners) if owner is not None]
    before = record_calls(network, first[None], first_codes[None])
    behind = record_calls(network, numbers, codes)
    starts = [first, *(before[call].vectors[0] for call in calls)]
    ends = [numbers, *(behind[call].vectors for call in calls)]
    line = _Line(
        network=network,
        cat=codes,
        start=starts,
        step=[end - start for start, end in zip(starts, ends, strict=True)],
        calls=calls,
        owners=[torch.from_numpy(owner) for owner in owners if owner is not None],
        given={},
    )
    with torch.no_grad():
        wanted = network(first[None], first_codes[None]).numpy()
    with hooked(network, line.replace):
        found = line.answers(np.arange(len(num)), np.zeros(len(num)))
        if not np.allclose(found, wanted, rtol=_SAME, atol=_SAME):
            raise Unexplained("its network reads categories in another way than through nn.Embedding")
        yield line


@dataclass(slots=True)
class _Intervals:
    """Parts of the rows' lines: from `a` to `b`, with the network's answers at both ends."""

    rows: Array
    a: Array
    b: Array
    answer_a: Array
    answer_b: Array


def _integrate(line: _Line, rows: int) -> Parts:
    todo = _first_intervals(line, rows)
    per_row = (rows, _FIRST_INTERVALS, -1)
    base = todo.answer_a.reshape(per_row)[:, 0]
    margin = todo.answer_b.reshape(per_row)[:, -1]
    places, weights = np.polynomial.legendre.leggauss(_NODES)
    places, weights = (places + 1) / 2, weights / 2
    features = None
    for left in reversed(range(_ROUNDS)):
        width = todo.b - todo.a
        at = todo.a[:, None] + width[:, None] * places
        slopes = line.slopes(np.repeat(todo.rows, _NODES), at.ravel())
        slopes = slopes.reshape(len(todo.rows), _NODES, *slopes.shape[1:])
        parts = np.einsum("n,inof->iof", weights, slopes) * width[:, None, None]
        apart = np.abs(parts.sum(axis=2) - (todo.answer_b - todo.answer_a))
        same = apart <= _SAME * np.maximum(1.0, np.abs(todo.answer_b))
        done = same.all(axis=1) | (left == 0)
        if features is None:
            features = np.zeros((rows, *parts.shape[1:]))
        np.add.at(features, todo.rows[done], parts[done])
        if done.all():
            break
        todo = _split(line, todo, ~done, slopes.sum(axis=3), apart, in_the_middle=left % 2 == 0)
    assert features is not None
    return Parts(features=features, base=base, margin=margin)


def _first_intervals(line: _Line, rows: int) -> _Intervals:
    ends = np.linspace(0.0, 1.0, _FIRST_INTERVALS + 1)
    which = np.repeat(np.arange(rows), len(ends))
    answers = line.answers(which, np.tile(ends, rows)).reshape(rows, len(ends), -1)
    outputs = answers.shape[2]
    return _Intervals(
        rows=np.repeat(np.arange(rows), _FIRST_INTERVALS),
        a=np.tile(ends[:-1], rows),
        b=np.tile(ends[1:], rows),
        answer_a=answers[:, :-1].reshape(-1, outputs),
        answer_b=answers[:, 1:].reshape(-1, outputs),
    )


def _split(
    line: _Line, todo: _Intervals, wrong: Array, speed: Array, apart: Array, *, in_the_middle: bool
) -> _Intervals:
    """Two intervals for each that is wrong. A network of ReLUs has one slope before a kink and one behind it: where the
    two lines meet, the interval is split. Every other time it is split in the middle, since several kinks in an
    interval lead to a place near its end."""
    rows, a, b = todo.rows[wrong], todo.a[wrong], todo.b[wrong]
    worst = apart[wrong].argmax(axis=1)
    each = np.arange(len(rows))
    before, behind = speed[wrong][each, 0, worst], speed[wrong][each, -1, worst]
    gain = (todo.answer_b - todo.answer_a)[wrong][each, worst]
    with np.errstate(divide="ignore", invalid="ignore"):
        kink = (gain + before * a - behind * b) / (before - behind)
    inside = (kink > a) & (kink < b) & (not in_the_middle)  # NaN is not inside
    middle = np.where(inside, kink, (a + b) / 2)
    there = line.answers(rows, middle)
    return _Intervals(
        rows=np.concatenate([rows, rows]),
        a=np.concatenate([a, middle]),
        b=np.concatenate([middle, b]),
        answer_a=np.concatenate([todo.answer_a[wrong], there]),
        answer_b=np.concatenate([there, todo.answer_b[wrong]]),
    )


# Nothing is assumed about how a network is written, only that categories enter through nn.Embedding: which codes a call
# is given when one column changes says which of its vectors are that column's.
class Call(NamedTuple):
    """One call of an embedding layer: the codes [rows, ...] it was given, and the vectors [rows, ..., width]."""

    codes: Tensor
    vectors: Tensor


@contextmanager
def hooked(network: nn.Module, hook: Hook) -> Iterator[None]:
    """Lets `hook` see, and replace, what every embedding layer of the network gives."""
    layers = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    hooks = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def record_calls(network: nn.Module, num: Tensor, cat: Tensor) -> list[Call]:
    """Returns the calls of embedding layers for these rows, in order."""
    seen: list[Call] = []

    def hook(_layer: nn.Module, given: Any, vectors: Tensor) -> None:
        seen.append(Call(given[0], vectors))

    with hooked(network, hook), torch.no_grad():
        network(num, cat)
    return seen


def find_owners(network: nn.Module, num: Tensor, cat: Tensor, baseline: Tensor) -> list[Array | None]:
    """For each call, which categorical column each of its vectors belongs to: float64[vectors, columns] of 0 and 1.
    None for a call that no column changes. `baseline`: codes int64[columns]."""
    start = baseline.expand(len(cat), -1)
    before = record_calls(network, num, start)
    owners = [np.zeros((call.codes[0].numel(), cat.shape[1])) for call in before]
    for column in range(cat.shape[1]):
        changed = start.clone()
        changed[:, column] = cat[:, column]
        after = record_calls(network, num, changed)
        if len(after) != len(before):
            raise Unexplained("its network calls other embedding layers for other categories")
        for owner, old, new in zip(owners, before, after, strict=True):
            moved = (old.codes != new.codes).reshape(len(old.codes), -1).any(dim=0).numpy()
            if moved.any() and len(old.codes) != len(cat):
                raise Unexplained("an embedding layer of its network does not have the rows first")
            owner[moved, column] = 1.0
    if any((owner.sum(axis=1) > 1).any() for owner in owners):
        raise Unexplained("an embedding layer of its network reads several columns at once")
    return [owner if owner.any() else None for owner in owners]
