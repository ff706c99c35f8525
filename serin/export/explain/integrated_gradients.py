"""Integrated gradients (Sundararajan et al., 2017) for the networks that Serin builds.

The path goes from the baseline to the row in a straight line, for numbers as they are and for categories between the
vectors that the embedding table gives. A network with ReLU has kinks on that line, where no fixed number of steps is
exact: an interval whose parts do not add up to the difference of the network's answers at its ends is split, so the
contributions of a row add up to its answer minus the baseline's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from serin.export.explain.explanation import Parts
from serin.formats.wire import Array
from serin.models.table import CategoryTable

_NODES = 4  # of Gauss and Legendre in an interval: exact for polynomials of degree 7
_FIRST_INTERVALS = 8
_ROUNDS = 40  # of splitting
_POINTS = 16_384  # points on the path that go through the network at once
_SAME = 1e-7  # of an interval's parts and the difference at its ends, relative where that is large


def integrated_gradients(
    network: nn.Module, num: Array, cat: Array, baseline_num: Array, baseline_cat: Array
) -> Parts:
    """The parts of each row's margin beside the network's answer for the baseline. The network must be in float64 and
    in evaluation mode; what it does with categories must go through a CategoryTable."""
    with _straight_line(network, num, cat, baseline_num, baseline_cat) as line:
        return _integrate(line, len(num))


@dataclass(slots=True)
class _Line:
    """Points between the baseline and each row: `start` and `step` of the numbers and of every embedding table."""

    network: nn.Module
    cat: Tensor
    start: list[Tensor]
    step: list[Tensor]
    tables: list[CategoryTable]
    given: dict[CategoryTable, Tensor]

    def _forward(self, rows: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The answers at the point `at` of each row's line, and the inputs they depend on."""
        inputs = []
        for start, step in zip(self.start, self.step, strict=True):
            share = at.reshape(-1, *[1] * (step.ndim - 1))
            inputs.append((start + share * step[rows]).requires_grad_(torch.is_grad_enabled()))
        self.given.update(zip(self.tables, inputs[1:], strict=True))
        return self.network(inputs[0], self.cat[rows]), inputs

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
                if self.tables:
                    ways = zip(gradients[1:], self.step[1:], strict=True)
                    by_table = [(gradient * step[some]).sum(dim=2) for gradient, step in ways]
                    parts.append(torch.stack(by_table).sum(dim=0))
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
    """The line, with the embedding tables of the network giving points on it instead of rows of theirs."""
    codes = torch.from_numpy(np.ascontiguousarray(cat, dtype=np.int64))
    numbers = torch.from_numpy(np.ascontiguousarray(num, dtype=np.float64))
    first = torch.from_numpy(np.asarray(baseline_num, np.float64))
    tables = [module for module in network.modules() if isinstance(module, CategoryTable)]
    base_codes = torch.from_numpy(np.asarray(baseline_cat, np.int64))[None]
    with torch.no_grad():
        starts = [first, *(table(base_codes)[0] for table in tables)]
        ends = [numbers, *(table(codes) for table in tables)]
    line = _Line(
        network=network,
        cat=codes,
        start=starts,
        step=[end - start for start, end in zip(starts, ends, strict=True)],
        tables=tables,
        given={},
    )

    def on_the_line(table: Any, _args: Any, _output: Any) -> Tensor:
        return line.given[table]

    hooks = [table.register_forward_hook(on_the_line) for table in tables]
    try:
        yield line
    finally:
        for hook in hooks:
            hook.remove()


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
        todo = _split(line, todo, ~done, slopes.sum(axis=3), apart)
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


def _split(line: _Line, todo: _Intervals, wrong: Array, speed: Array, apart: Array) -> _Intervals:
    """Two intervals for each that is wrong. A network of ReLUs has one slope before a kink and one behind it: where the
    two lines meet, the interval is split; in the middle where they do not meet inside."""
    rows, a, b = todo.rows[wrong], todo.a[wrong], todo.b[wrong]
    worst = apart[wrong].argmax(axis=1)
    each = np.arange(len(rows))
    before, behind = speed[wrong][each, 0, worst], speed[wrong][each, -1, worst]
    gain = (todo.answer_b - todo.answer_a)[wrong][each, worst]
    with np.errstate(divide="ignore", invalid="ignore"):
        kink = (gain + before * a - behind * b) / (before - behind)
    inside = (kink > a) & (kink < b)  # NaN is not
    middle = np.where(inside, kink, (a + b) / 2)
    there = line.answers(rows, middle)
    return _Intervals(
        rows=np.concatenate([rows, rows]),
        a=np.concatenate([a, middle]),
        b=np.concatenate([middle, b]),
        answer_a=np.concatenate([todo.answer_a[wrong], there]),
        answer_b=np.concatenate([there, todo.answer_b[wrong]]),
    )
