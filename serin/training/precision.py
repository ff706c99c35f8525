"""In which numbers a step is computed: by hardware, since bf16 is a gift on one machine and a ruin on another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "bf16"]


def choose_precision(wanted: Literal["auto", "fp32", "bf16"], device: torch.device) -> Precision:
    """What `auto` means here: fp32 on a CPU (bf16 was 140 times slower on one), TF32 matrix products on a GPU that has
    them. Autocast costs small networks more than it gives, so bf16 is for those who ask."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8:
        return "tf32"
    return "fp32"


def computing(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Around the forward pass of a training step."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


@contextmanager
def matrix_products(precision: Precision) -> Iterator[None]:
    """Around all steps: TF32 in matrix products or not. What scores are measured with is always full fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
