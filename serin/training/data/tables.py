"""A split for training: resident in the device's memory, or memory-mapped in its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor

from serin.errors import BundleBroken
from serin.formats.shards import Array, SplitArrays

_SHARE_OF_GPU = 0.6  # of the free memory, for resident tables; the rest is for the network and its step
_SHARE_OF_HOST = 0.4
_GPU_WORDS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """num float32[n, k], cat int64[n, m], target float32[n], on the device of the step."""

    num: Tensor
    cat: Tensor
    target: Tensor

    def cut(self, parts: int) -> list[Batch]:
        """Cuts the batch into equal parts; returns it whole when it cannot be divided."""
        if parts == 1 or len(self.target) % parts:
            return [self]
        pieces = (tensor.chunk(parts) for tensor in (self.num, self.cat, self.target))
        return [Batch(num=num, cat=cat, target=target) for num, cat, target in zip(*pieces, strict=True)]

    def clone(self) -> Batch:
        return Batch(num=self.num.clone(), cat=self.cat.clone(), target=self.target.clone())

    def copy_(self, other: Batch) -> None:
        self.num.copy_(other.num)
        self.cat.copy_(other.cat)
        self.target.copy_(other.target)


def open_table(
    split: SplitArrays, device: torch.device, *, sizes: Sequence[int], budget: int | None = None
) -> ResidentTable | MappedTable:
    """Opens a split: resident if it fits into `budget` bytes (default: a share of the free memory), else mapped."""
    allowed = _free_bytes(device) if budget is None else budget
    needed = sum(part.nbytes for parts in (split.num, split.cat, split.target) for part in parts)
    table = ResidentTable(split, device) if needed <= allowed else MappedTable(split, device)
    table.check_codes(sizes)
    return table


class ResidentTable:
    """The whole split in the device's memory, each row contiguous: a batch is one gather, without the host."""

    def __init__(self, split: SplitArrays, device: torch.device) -> None:
        self.rows = len(split)
        self.on_gpu = device.type != "cpu"
        self.device = device
        self._numeric, self._codes = split.num[0].shape[1], split.cat[0].shape[1]
        # Four bytes a column, floats by their bits: num, then cat, then the target. A GPU gathers rows of a multiple
        # of 16 bytes with its widest loads.
        self._target = self._numeric + self._codes
        self._several = split.target[0].ndim == 2
        used = self._target + (split.target[0].shape[1] if self._several else 1)
        width = -(-used // _GPU_WORDS) * _GPU_WORDS if self.on_gpu else used
        self._targets = slice(self._target, used)
        self._packed = torch.zeros((self.rows, width), dtype=torch.int32, device=device)
        start = 0
        for num, cat, target in zip(split.num, split.cat, split.target, strict=True):
            answers = target.reshape(len(target), -1)
            words = [np.ascontiguousarray(part).view(np.int32) for part in (num, cat, answers)]
            rows = torch.from_numpy(np.concatenate(words, axis=1))
            self._packed[start : start + len(target), : rows.shape[1]] = rows.to(device)
            start += len(target)

    def check_codes(self, sizes: Sequence[int]) -> None:
        if sizes and self.rows:
            codes = self._packed[:, self._numeric : self._target]
            _refuse_codes(codes.amin(0).tolist(), codes.amax(0).tolist(), sizes)

    def take(self, index: Tensor) -> Batch:
        return self._batch(self._packed.index_select(0, index))

    def slice(self, start: int, stop: int) -> Batch:
        return self._batch(self._packed[start:stop])

    def _batch(self, words: Tensor) -> Batch:
        return Batch(
            num=words[:, : self._numeric].view(torch.float32),
            cat=words[:, self._numeric : self._target].long(),
            target=words[:, self._targets if self._several else self._target].view(torch.float32),
        )


class MappedTable:
    """The split in its files, read in runs of neighbouring rows."""

    on_gpu = False

    def __init__(self, split: SplitArrays, device: torch.device) -> None:
        self.rows = len(split)
        self.device = device
        self._split = split
        self._starts = np.cumsum([0, *(len(part) for part in split.rows)])

    def check_codes(self, sizes: Sequence[int]) -> None:
        for part in self._split.cat if sizes else ():
            _refuse_codes(part.min(axis=0).tolist(), part.max(axis=0).tolist(), sizes)

    @property
    def row_bytes(self) -> int:
        return sum(part.nbytes // max(1, len(part)) for part in self._columns(0))

    def empty(self, rows: int, *, device: torch.device, pinned: bool = False) -> tuple[Tensor, ...]:
        """Returns buffers for so many rows of num, cat (int32) and target."""
        return tuple(
            torch.empty((rows, *part.shape[1:]), dtype=dtype, device=device, pin_memory=pinned)
            for part in self._columns(0)
            for dtype in [torch.from_numpy(np.empty(0, part.dtype)).dtype]
        )

    def read_into(self, room: Sequence[Tensor], at: int, start: int, stop: int) -> None:
        """Reads the rows from `start` up to `stop` into host memory, from its row `at` on."""
        part = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first = int(self._starts[part])
            end = min(stop, int(self._starts[part + 1]))
            for tensor, column in zip(room, self._columns(part), strict=True):
                tensor.numpy()[at : at + end - start] = column[start - first : end - first]
            at, start, part = at + end - start, end, part + 1

    def slice(self, start: int, stop: int) -> Batch:
        room = self.empty(stop - start, device=torch.device("cpu"), pinned=self.device.type == "cuda")
        self.read_into(room, 0, start, stop)
        num, cat, target = (tensor.to(self.device) for tensor in room)
        return Batch(num=num, cat=cat.long(), target=target)

    def _columns(self, part: int) -> tuple[Array, Array, Array]:
        return self._split.num[part], self._split.cat[part], self._split.target[part]


def gather(num: Tensor, cat: Tensor, target: Tensor, index: Tensor) -> Batch:
    return Batch(
        num=num.index_select(0, index),
        cat=cat.index_select(0, index).long(),
        target=target.index_select(0, index),
    )


def _refuse_codes(lowest: Sequence[int], highest: Sequence[int], sizes: Sequence[int]) -> None:
    """Refuses codes out of range: they would train another column's embedding, or crash the process on a GPU."""
    for column, (low, high, size) in enumerate(zip(lowest, highest, sizes, strict=True)):
        if low < 0 or high >= size:
            reason = f"categorical column {column} has codes {low} to {high}, but dataset.json says 0 to {size - 1}"
            raise BundleBroken(path="cat.i32", reason=reason)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_GPU)
    return int(psutil.virtual_memory().available * _SHARE_OF_HOST)
