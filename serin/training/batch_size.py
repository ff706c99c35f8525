"""How many rows make a step when the spec says auto, and how many threads a step is worth. Pure."""

from __future__ import annotations

from typing import Literal

_STEPS_PER_EPOCH = 200
_SMALLEST = 256
_LARGEST = {"cpu": 8192, "cuda": 65536}
_PRODUCTS_PER_THREAD = 10_000_000


def choose_threads(products: int, *, cores: int) -> int:
    """Threads for a step of so many multiplications: a small step is done before a second thread has woken up."""
    return max(1, min(cores, products // _PRODUCTS_PER_THREAD))


def choose_batch_rows(
    wanted: int | Literal["auto"], *, rows: int, ranks: int, device: Literal["cpu", "cuda"]
) -> int:
    """Rows per step, all ranks together: a multiple of `ranks`, never more than there are.

    Auto: the power of two that gives an epoch some two hundred steps, enough to learn from a small table, within what
    a device handles well: a GPU wants large batches, a CPU gains nothing above a few thousand.
    """
    if wanted == "auto":
        power = 1 << max(0, (rows // _STEPS_PER_EPOCH).bit_length() - 1)
        within = min(max(power, _SMALLEST), _LARGEST[device] * ranks)
        wanted = -(-within // ranks) * ranks
    return min(wanted, rows) // ranks * ranks
