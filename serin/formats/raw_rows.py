"""Rows of a split as requests would bring them, with what is known of them: the target and the row's id."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from serin.formats.wire import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawRows:
    """`table`: request columns in wire form, oldest row first. `target`: as the dataset has it."""

    table: pa.Table
    target: Array
    row: Array

    def __len__(self) -> int:
        return len(self.row)
