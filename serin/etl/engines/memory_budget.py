"""Plans the memory: how much is available, and how many rows a piece may have so that every worker stays within its
share."""

from __future__ import annotations

from pathlib import Path

import psutil

from serin.etl.binding.layout import JoinLayout, Layout
from serin.etl.sources.tables import Table
from serin.machine import environment

MIN_ROWS = 2**12  # below this a piece costs more in overhead than it saves
_CGROUP = Path("/sys/fs/cgroup")
_WIDTH = {"float": 4, "int": 8, "timestamp": 8, "bool": 1, "string": 4}
_INDEX = 48  # for each row: distinct keys, codes, positions, and what sorting them takes
_MOST_GPU_ROWS = 2**28  # cuDF counts rows in 31 bits
_COPIES = 6  # decoded, as columns, joined, in split order, as features, and on their way to disk


def available_bytes() -> int:
    """What may still be used: the machine's free memory, or less in a container or in a Slurm job."""
    free = int(psutil.virtual_memory().available)
    _, given = environment.slurm_share()
    if given is not None:
        free = min(free, max(0, given - int(psutil.Process().memory_info().rss)))
    limit, used, cache = (_cgroup_number(name) for name in ("memory.max", "memory.current", "inactive_file"))
    return free if limit is None else min(free, max(0, limit - (used or 0) + (cache or 0)))


def row_bytes(layout: Layout, table: Table) -> int:
    """What a row costs while its piece is worked on. Text counts as much as it takes in the file, unpacked."""
    used = sum(_WIDTH[kind] for kind in layout.kinds.values())
    text = 0
    if any(kind == "string" for kind in layout.kinds.values()):
        text = sum(group.bytes for group in table.groups) // max(table.rows, 1)
    return _COPIES * (used + 16) + 2 * text


def needed_bytes(layout: Layout, table: Table) -> int:
    """What it takes to keep all pieces in memory: the columns, their rows in split order, and the features."""
    return 3 * sum(_WIDTH[kind] for kind in layout.kinds.values()) * table.rows


def partner_bytes(join: JoinLayout, table: Table) -> int:
    """What a table to be joined takes in memory: the columns in use, text as in the file unpacked, and its index."""
    used = sum(_WIDTH[read.kind] for read in join.reads)
    text = sum(group.bytes for group in table.groups) if any(r.kind == "string" for r in join.reads) else 0
    return table.rows * (used + _INDEX) + 2 * text


def shared_budget(budget_bytes: int) -> int:
    """Bytes for what all pieces share, beside the piece that a worker has `budget_bytes` for."""
    return min(2 * budget_bytes, available_bytes() // 4)


def plan_rows(layout: Layout, table: Table, *, budget_bytes: int, workers: int, least: int, most: int) -> int:
    """Returns rows per piece: enough pieces for all workers, `least` to `most` rows each, and none too large for its
    budget.

    The size doubles where a table has grown enough, not little by little: a growing table is cut as before, and its old
    pieces are found again. A small table in one file is one piece per worker, because the fixed cost of a piece matters
    there.
    """
    even = max(least, min(most, 1 << (-(-table.rows // (2 * workers))).bit_length() - 1))
    share = -(-table.rows // workers)
    if least <= share and table.rows <= most and len({group.file for group in table.groups}) == 1:
        largest = max(group.rows for group in table.groups)
        even = -(-share // largest) * largest
    return max(MIN_ROWS, min(even, budget_bytes // row_bytes(layout, table)))


def plan_gpu_rows(layout: Layout, table: Table, *, budget_bytes: int, gpus: int) -> int:
    """Rows that a GPU works on at once: as many as fit, since few of them cost as much as many; some for each GPU."""
    even = -(-table.rows // max(gpus, 1))
    return max(MIN_ROWS, min(even, _MOST_GPU_ROWS, budget_bytes // row_bytes(layout, table)))


def _cgroup_number(name: str) -> int | None:
    try:
        if name == "inactive_file":
            lines = (_CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
            return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), None)
        text = (_CGROUP / name).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
