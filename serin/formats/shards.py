"""The rows of a dataset on disk: `<split>/part-00000/{num.f32, cat.i32, target.f32, rows.i64, header.json}`.

Plain row-major little-endian arrays, 2^20 rows to a part, the last one shorter, so that a reader maps them or copies
them whole. Several writers may fill one split at once: each row has its place. A part is finished by its header.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from serin.errors import BundleBroken
from serin.machine.durable import begin_sync
from serin.machine.typed_json import checked
from serin.store.file_digests import digest_of

FORMAT, VERSION = "serin.shard", 3
PART_ROWS = 2**20
_DIGESTED_ROWS = 2**16  # copied at once, where not all columns are digested
HEADER = "header.json"
FILES = {"num.f32": "<f4", "cat.i32": "<i4", "target.f32": "<f4", "rows.i64": "<i8"}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Features, target and ids of some rows: num float32[n,k], cat int32[n,m], target float32[n]
    ([n, k] with several targets), rows int64[n]."""

    num: Array
    cat: Array
    target: Array
    rows: Array

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Rows:
        return Rows(num=self.num[part], cat=self.cat[part], target=self.target[part], rows=self.rows[part])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitArrays:
    """A split's parts, in row order, mapped from their files: one array per part in each of the four."""

    num: tuple[Array, ...]
    cat: tuple[Array, ...]
    target: tuple[Array, ...]
    rows: tuple[Array, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.rows)

    def whole(self) -> Rows:
        """The split as one array each; copied only when it has more than one part."""
        joined = [
            parts[0] if len(parts) == 1 else np.concatenate(parts)
            for parts in (self.num, self.cat, self.target, self.rows)
        ]
        return Rows(num=joined[0], cat=joined[1], target=joined[2], rows=joined[3])

    def batches(self, size: int) -> Iterator[tuple[Array, Array, Array]]:
        """Yields num, cat (int64) and target in memory, at most `size` rows at a time."""
        for num, cat, target in zip(self.num, self.cat, self.target, strict=True):
            for at in range(0, len(target), size):
                rows = slice(at, at + size)
                yield np.array(num[rows]), np.asarray(cat[rows], np.int64), np.asarray(target[rows])


def count_parts(rows: int) -> int:
    return -(-rows // PART_ROWS)


def part_folder(split: Path, index: int) -> Path:
    return split / f"part-{index:05d}"


def part_files(split: Path, index: int) -> list[Path]:
    """The files with a part's rows."""
    return [part_folder(split, index) / name for name in FILES]


def part_paths(dataset: Path) -> Iterator[Path]:
    """The folders of all parts of a dataset, and all that is in them."""
    for folder in dataset.glob("*/part-*"):
        yield folder
        yield from folder.iterdir()


def write_rows(split: Path, start: int, rows: Rows) -> None:
    """Puts rows at their place in the split, over as many parts as they reach. Safe beside writers of other rows."""
    with RowWriter(split) as writer:
        writer.write(start, rows)


class RowWriter:
    """Puts rows at their places in a split, and keeps its files open until the end of the block."""

    def __init__(self, split: Path) -> None:
        self._split = split
        self._open: dict[int, tuple[int, ...]] = {}  # of each part
        self._written: dict[int, tuple[int, int]] = {}  # of each file: from which byte to which

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptors in self._open.values():
            for descriptor in descriptors:
                begin_sync(descriptor, *self._written.get(descriptor, (0, 0)))
                os.close(descriptor)

    def write(self, start: int, rows: Rows) -> None:
        for part, offset, piece in _by_part(start, rows):
            for descriptor, (array, width) in zip(self._files(part), _arrays(piece), strict=True):
                begin, end = offset * width, (offset + len(piece)) * width
                write_at(descriptor, np.ascontiguousarray(array), begin)
                first, last = self._written.get(descriptor, (begin, end))
                self._written[descriptor] = min(first, begin), max(last, end)

    def _files(self, part: int) -> tuple[int, ...]:
        if part not in self._open:
            folder = part_folder(self._split, part)
            folder.mkdir(parents=True, exist_ok=True)
            how = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._open[part] = tuple(os.open(folder / name, how, 0o644) for name in FILES)
        return self._open[part]


def place_rows(split: Path, start: int, rows: Rows) -> Iterator[tuple[Path, Array, int]]:
    """For each file that the rows reach: the file, what belongs there, and from which byte on. Makes folders."""
    for part, offset, piece in _by_part(start, rows):
        folder = part_folder(split, part)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (array, width) in zip(FILES, _arrays(piece), strict=True):
            yield folder / name, array, offset * width


def _by_part(start: int, rows: Rows) -> Iterator[tuple[int, int, Rows]]:
    """For each part that the rows reach: its number, the place there of the first of them, and those of them."""
    done = 0
    while done < len(rows):
        part, offset = divmod(start + done, PART_ROWS)
        count = min(PART_ROWS - offset, len(rows) - done)
        yield part, offset, rows[done : done + count]
        done += count


def _arrays(rows: Rows) -> Iterator[tuple[Array, int]]:
    """The arrays in the order of the files, each with the bytes of a row."""
    for dtype, array in zip(FILES.values(), (rows.num, rows.cat, rows.target, rows.rows), strict=True):
        width = (array.shape[1] if array.ndim == 2 else 1) * np.dtype(dtype).itemsize
        yield array.astype(dtype, copy=False), width


def digested_whole(approximate: Collection[str]) -> list[str]:
    """The files whose digests are over all their bytes."""
    return [name for name in FILES if name != "num.f32" or not approximate]


def digest_part_file(
    split: Path, index: int, rows: int, name: str, numeric: Sequence[str], approximate: Sequence[str] = ()
) -> bytes:
    """The digest of a file of a part of a split of `rows` rows. Columns named in `approximate` may differ in their last
    bit between machines: it leaves them out."""
    file = part_folder(split, index) / name
    if name in digested_whole(approximate):
        with file.open("rb", buffering=0) as content:
            return digest_of(content)
    num = _map(file, FILES[name], (_rows_of_part(index, rows), len(numeric)))
    exact = [place for place, column in enumerate(numeric) if column not in approximate]
    digest = blake3()
    for start in range(0, len(num), _DIGESTED_ROWS):
        digest.update(num[start : start + _DIGESTED_ROWS, exact].tobytes())
    return digest.digest()


def seal_part(
    split: Path,
    index: int,
    rows: int,
    numeric: Sequence[str],
    categorical: Sequence[str],
    approximate: Sequence[str] = (),
    digests: Sequence[bytes] | None = None,
) -> str:
    """Writes the header of a part of a split of `rows` rows; the part's digest, over those of its files.

    `digests`: what `digest_part_file` gave for each of FILES, where threads have computed it.
    """
    count = _rows_of_part(index, rows)
    folder = part_folder(split, index)
    if digests is None:
        digests = [digest_part_file(split, index, rows, name, numeric, approximate) for name in FILES]
    digest = blake3(f"{FORMAT} {VERSION}\n".encode() + b"".join(digests)).hexdigest()
    header = {
        "format": FORMAT,
        "version": VERSION,
        "rows": count,
        "numeric": list(numeric),
        "categorical": list(categorical),
        "approximate": list(approximate),
        "files": {
            name: {"dtype": dtype, "shape": shape}
            for (name, dtype), shape in zip(
                FILES.items(),
                ([count, len(numeric)], [count, len(categorical)], _target_shape(folder, count), [count]),
                strict=True,
            )
        },
        "digest": digest,
    }
    (folder / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
    return digest


def _rows_of_part(index: int, rows: int) -> int:
    return min(PART_ROWS, rows - index * PART_ROWS)


def _target_shape(folder: Path, count: int) -> list[int]:
    """[count], or with several targets [count, targets]: as many as there were written."""
    targets = (folder / "target.f32").stat().st_size // (4 * count)
    return [count] if targets == 1 else [count, targets]


def read_split(path: Path | str, split: str) -> SplitArrays:
    """The split of a dataset folder; BundleBroken when a part is missing or has another size than its header says."""
    parts = [_read_part(folder) for folder in sorted((Path(path) / split).glob("part-*"))]
    if not parts:
        raise BundleBroken(path=str(Path(path) / split), reason="no parts")
    return SplitArrays(
        num=tuple(part.num for part in parts),
        cat=tuple(part.cat for part in parts),
        target=tuple(part.target for part in parts),
        rows=tuple(part.rows for part in parts),
    )


def _read_part(folder: Path) -> Rows:
    try:
        header = checked(json.loads((folder / HEADER).read_text(encoding="utf-8")), FORMAT, VERSION)
        arrays = [_map(folder / name, dtype, header["files"][name]["shape"]) for name, dtype in FILES.items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleBroken(path=str(folder), reason=f"{type(error).__name__}: {error}") from error
    return Rows(num=arrays[0], cat=arrays[1], target=arrays[2], rows=arrays[3])


def _map(file: Path, dtype: str, shape: Sequence[int]) -> Array:
    wanted = int(np.prod(shape)) * np.dtype(dtype).itemsize
    found = file.stat().st_size
    if found != wanted:
        raise ValueError(f"{file.name} has {found} bytes, its header says {wanted}")
    if wanted == 0:  # an empty file cannot be mapped
        return np.empty(tuple(shape), dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=tuple(shape))


def write_at(descriptor: int, array: Array, offset: int) -> None:
    """All of a contiguous array, from that byte of the file on."""
    content = memoryview(array.data).cast("B") if array.size else memoryview(b"")
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
