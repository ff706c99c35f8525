"""What an explanation is before anybody looks at it: arrays that add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from serin.formats.wire import Array

Scale = Literal["log-odds", "logit of each class", "target"]
Method = Literal["TreeSHAP", "integrated gradients"]


class Unexplained(Exception):
    """Why a model cannot be explained. Never leaves this folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """base[n, outputs] + the sum of features[n, outputs, k] over k is margin[n, outputs]."""

    features: Array
    base: Array
    margin: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """`margins`: num float32[n, k] and cat int64[n, m] to logits or values, [n, outputs]; `explain`: their parts."""

    method: Method
    margins: Callable[[Array, Array], Array]
    explain: Callable[[Array, Array], Parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """What each raw column adds to the score of each row: base + the sum of `values` over the columns is `margin`.

    `values` is float64[rows, outputs, columns]; `base`, `margin` and `score` are float64[rows, outputs]. `outputs`
    names the classes or targets; a single output is called "score". `scale` says in which unit contributions, base and
    margin are; `score` is what the served model answers. `look_up` reads the value of each looked-up column in each
    row from the tables of the release."""

    columns: tuple[str, ...]
    sources: dict[str, str]
    outputs: tuple[str, ...]
    values: Array
    base: Array
    margin: Array
    score: Array
    scale: Scale
    method: Method
    look_up: Callable[[], Mapping[str, Sequence[Any]]]
    note: str = ""

    def __len__(self) -> int:
        return len(self.values)


def sum_by_column(features: Array, places: tuple[int, ...], columns: int) -> Array:
    """float64[rows, outputs, columns] from [rows, outputs, features]: the sum over the features of each raw column."""
    belongs = np.zeros((len(places), columns))
    belongs[np.arange(len(places)), list(places)] = 1.0
    return np.asarray(features @ belongs)
