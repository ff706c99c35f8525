"""Chooses the precision of a step: what the hardware supports, and of that what a measurement finds faster.

bf16 can be much faster, or 140 times slower on a CPU without the instructions, and autocast costs a small network more
than it gains. So nothing but fp32 is used without a measurement against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

_WORTH_IT = 1.05  # speed-up over the more exact one that is required
# Other programs share the cores: 6 of 20 timings of equal steps differed by more than 5%.
_WORTH_IT_ON_CPU = 1.5
_MORE_EXACT_FIRST: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")


def candidates(device: torch.device) -> tuple[Precision, ...]:
    """Returns the precisions that this hardware computes natively, the most exact first."""
    if device.type != "cuda":
        return ("fp32", "bf16") if _cpu_has_bf16() else ("fp32",)
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        return ("fp32", "tf32", "bf16")
    return ("fp32", "fp16") if capability >= (7, 0) else ("fp32",)


def refuse_precision(wanted: Literal["auto"] | Precision, device: torch.device) -> str:
    """Returns why `wanted` is not available here; '' when it is, though it may be slow."""
    if device.type == "cpu":
        if wanted == "tf32":
            return "training.precision=tf32: TF32 needs a GPU and this run is on a CPU; use fp32 or auto"
        return ""
    capability = torch.cuda.get_device_capability(device)
    needed = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (5, 3)}.get(wanted, (0, 0))
    if capability >= needed:
        return ""
    have, want = (".".join(map(str, numbers)) for numbers in (capability, needed))
    return (
        f"training.precision={wanted} needs a GPU of compute capability {want}, this one has {have}; use auto"
    )


def choose_precision(seconds: Mapping[Precision, float], *, on_cpu: bool = False) -> tuple[Precision, str]:
    """Chooses from seconds per step the most exact precision that none beats by 5% (on a CPU by half), and the reason.
    Pure."""
    chosen: Precision = "fp32"
    worth_it = _WORTH_IT_ON_CPU if on_cpu else _WORTH_IT
    for precision in _MORE_EXACT_FIRST:
        if precision in seconds and seconds[chosen] > worth_it * seconds[precision]:
            chosen = precision
    return chosen, ", ".join(f"{name} {found * 1e3:.3f} ms" for name, found in seconds.items()) + " per step"


def computing(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context for the forward pass of a training step."""
    if precision in ("bf16", "fp16"):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        return torch.autocast(device.type, dtype=dtype)
    return nullcontext()


@contextmanager
def matrix_products(precision: Precision) -> Iterator[None]:
    """Returns the context for all steps: TF32 in matrix products or not. Scores are always measured in full fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _cpu_has_bf16() -> bool:
    """Returns whether the CPU has instructions for matrix products in bf16, not an emulation."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
