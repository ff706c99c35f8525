"""A sample of the training rows, collected once: the leak check and the charts of the report use it.

Row ids alone decide which rows are in it, so it does not depend on pieces or engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column, on_host, take
from serin.etl.dataset.transform import Divided
from serin.etl.engines.device import gpu_aware
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.groups import joined, sampled

SAMPLE_ROWS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """`share`: the approximate share of the training rows; 1 when all of them are here."""

    columns: Mapping[str, Column]
    target: npt.NDArray[np.float32]
    share: float


def take_train_sample(engine: Engine, held: Held, names: Sequence[str], *, rows: int) -> TrainSample:
    """The sample of divided pieces that have `rows` rows in all."""
    share = min(1.0, SAMPLE_ROWS / rows)
    parts = engine.collect(sample_piece, held, tuple(names), share)
    return TrainSample(
        columns={name: joined([columns[name] for _, columns in parts]) for name in names},
        target=np.concatenate([target for target, _ in parts]),
        share=share,
    )


@gpu_aware
def sample_piece(
    divided: Divided, names: Sequence[str], share: float
) -> tuple[npt.NDArray[np.float32], dict[str, Column]]:
    """The target and the columns of the piece's part of the sample."""
    train = divided.span(0)
    chosen = sampled(divided.rows[train], share)
    columns = take({name: divided.columns[name][train] for name in names}, chosen)
    own = {name: column.on_host() for name, column in columns.items()}
    return on_host(divided.target[train][chosen]), own
