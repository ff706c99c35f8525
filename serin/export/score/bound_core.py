"""A front on the CPU and a core whose inputs and outputs are bound to the memory of the device it runs on.

Several threads may run it: each computes features by itself, and the core takes one batch after the other. Batches of
the same size use the same memory on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import onnxruntime as ort

from serin.formats.wire import Array


class BoundFrontAndCore:
    """Two sessions as one model, as `session.FrontAndCore`. `rows`: of a whole batch."""

    def __init__(
        self,
        front: ort.InferenceSession,
        core: ort.InferenceSession,
        device: Literal["cpu", "cuda"],
        rows: int,
    ) -> None:
        self._front, self._core, self._device, self._rows = front, core, device, rows
        self._between = [tensor.name for tensor in core.get_inputs()]
        self._inputs: dict[str, ort.OrtValue] = {}
        self._one_at_a_time = threading.Lock()

    def run(self, outputs: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        between = self._front.run(self._between, dict(feed))
        with self._one_at_a_time:
            binding = self._core.io_binding()
            for name, values in zip(self._between, between, strict=True):
                binding.bind_ortvalue_input(name, self._on_device(name, np.ascontiguousarray(values)))
            for name in outputs:
                binding.bind_output(name, self._device)
            self._core.run_with_iobinding(binding)
            found: list[Array] = binding.copy_outputs_to_cpu()
        return found

    def _on_device(self, name: str, values: Array) -> ort.OrtValue:
        if len(values) != self._rows:
            return ort.OrtValue.ortvalue_from_numpy(values, self._device, 0)
        if name not in self._inputs:
            self._inputs[name] = ort.OrtValue.ortvalue_from_numpy(values, self._device, 0)
        else:
            self._inputs[name].update_inplace(values)
        return self._inputs[name]
