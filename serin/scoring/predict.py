"""Scores in bulk in this process, without a server: the bundle's own graph in ONNX Runtime, on the CPU or a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnxruntime as ort
import pyarrow as pa

from serin.errors import PredictionFailed, RowsUnfit
from serin.formats.bundle import CORE, FRONT, MODEL, Manifest, check_has_graph, verify_bundle, with_answers
from serin.formats.schema import read_schema
from serin.formats.wire import Array, as_arrow, to_wire
from serin.scoring.session import RUNTIME_ERRORS, FrontAndCore, Runs, open_session, run_in_batches

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

Place = Literal["cpu", "cuda"]

BATCH_ROWS = 8192  # enough to keep every core busy, small enough to stay in its cache
GPU_BATCH_ROWS = 65_536  # enough that launches take a small share of the time


class Scorer:
    """A verified bundle, ready to score tables of raw columns; also from several threads at once.

    On a GPU (`place`) strings and features stay on the CPU where the version was exported in two parts; the network's
    inputs and outputs are bound to the GPU's memory. `digest`: of the manifest that was checked before.
    """

    def __init__(
        self,
        bundle_folder: Path | str,
        *,
        threads: int | None = None,
        place: Place = "cpu",
        digest: str | None = None,
    ) -> None:
        folder = Path(bundle_folder)
        self.manifest = verify_bundle(folder, digest=digest)
        check_has_graph(self.manifest, "scoring without the gateway")
        self.schema = read_schema(folder)
        if MODEL not in self.manifest.files:
            reason = "it is a Triton repository, which only a server can run; call it through the gateway"
            raise PredictionFailed(model=self.manifest.name, status="refused", reason=reason)
        self._session = _open(folder, self.manifest, threads, place)
        self._batch_rows = BATCH_ROWS if place == "cpu" else GPU_BATCH_ROWS

    def answers(self, table: pa.Table | pd.DataFrame) -> dict[str, Array]:
        """Returns the model's outputs, [rows, ...], in the order of the rows."""
        return self.wire_answers(to_wire(table, self.schema))

    def wire_answers(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the same for columns that are already in wire form."""
        names = [output.name for output in self.schema.outputs]
        if not len(next(iter(inputs.values()))):
            return {
                output.name: np.empty((0, *output.dims), np.int64 if output.dtype == "INT64" else np.float32)
                for output in self.schema.outputs
            }
        try:
            return run_in_batches(self._session, inputs, names, self._batch_rows)
        except RUNTIME_ERRORS as error:
            raise PredictionFailed(model=self.manifest.name, status="an error", reason=str(error)) from error

    def score(self, table: pa.Table | pd.DataFrame) -> pa.Table:
        """Returns the given rows with the model's outputs as further columns."""
        rows = as_arrow(table)
        for output in self.schema.outputs:
            if output.name in rows.column_names:
                raise RowsUnfit(
                    column=output.name, reason="has the name of the model's answer; rename or drop it"
                )
        return with_answers(rows, self.answers(rows), self.schema)


def _open(folder: Path, manifest: Manifest, threads: int | None, place: Place) -> Runs:
    whole: Runs
    if place == "cpu":
        whole = open_session(folder / MODEL, threads=threads)
        return whole
    if not {FRONT, CORE} <= manifest.files.keys():
        logger.info("the version was not exported for a GPU: ONNX Runtime splits the whole graph itself")
        whole = open_session(folder / MODEL, threads=threads, device="cuda")
        return whole
    front = open_session(folder / FRONT, threads=threads)
    return BoundFrontAndCore(front, open_session(folder / CORE, device="cuda"), "cuda", GPU_BATCH_ROWS)


def score_table(bundle_folder: Path | str, table: pa.Table | pd.DataFrame) -> pa.Table:
    """Returns `table` with the model's outputs as further columns. Use a `Scorer` for more than one table."""
    return Scorer(bundle_folder).score(table)


# Several threads may run it: each computes features by itself, and the core takes one batch after the other. Batches of
# the same size use the same memory on the device.
class BoundFrontAndCore(FrontAndCore):
    """The same with the core's memory bound to a device. `rows`: of a whole batch."""

    def __init__(
        self,
        front: ort.InferenceSession,
        core: ort.InferenceSession,
        device: Literal["cpu", "cuda"],
        rows: int,
    ) -> None:
        super().__init__(front, core)
        self._device, self._rows = device, rows
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
