"""Converts a trained network to an ONNX graph: `num` float32[batch, k], `cat` int64[batch, m] to `logits`
float32[batch, n].

The graph is compared with the module before it is returned, and contains no trace of the machine it was made on.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import torch

from serin.errors import ExportFailed, GateFailed
from serin.models.shape import TableShape
from serin.scoring.session import open_session

OPSET = 20
# 1 because exporters tend to hard-code it, 7 because it is not a power of two.
VERIFIED_BATCHES = (1, 2, 7, 64)


def torch2onnx(module: torch.nn.Module, shape: TableShape, *, tolerance: float = 1e-4) -> onnx.ModelProto:
    """Returns the module's graph, validated on random rows. Raises GateFailed when it does not agree with the
    module."""
    module = module.eval()
    batch = torch.export.Dim("batch", min=1, max=2**30)
    rows = _random_rows(shape, 3)  # not 1: a batch of one would be taken for a constant
    try:
        with quiet("torch.onnx"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                rows,
                dynamo=True,
                opset_version=OPSET,
                input_names=["num", "cat"],
                output_names=["logits"],
                dynamic_shapes=({0: batch}, {0: batch}),
                external_data=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ExportFailed(what="the network", reason=str(error).strip().splitlines()[0]) from error
    assert program is not None
    model = program.model_proto
    _strip_traces(model)
    _verify(module, model, shape, tolerance)
    return model


def _random_rows(shape: TableShape, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(rows)
    num = random.standard_normal((rows, shape.numeric), dtype=np.float32)
    codes = [random.integers(0, size, rows) for size in shape.sizes]
    cat = np.stack(codes, axis=1) if codes else np.zeros((rows, 0))
    return torch.from_numpy(num), torch.from_numpy(cat.astype(np.int64))


def _verify(module: torch.nn.Module, model: onnx.ModelProto, shape: TableShape, tolerance: float) -> None:
    session = open_session(model)
    unit = module.get_buffer("scale").numpy() if shape.units else 1.0  # of the target
    for rows in VERIFIED_BATCHES:
        num, cat = _random_rows(shape, rows)
        with torch.inference_mode():
            wanted = module(num, cat).numpy()
        (found,) = session.run(["logits"], {"num": num.numpy(), "cat": cat.numpy()})
        if not np.allclose(found, wanted, rtol=tolerance, atol=tolerance * unit):
            worst = float(np.max(np.abs(found - wanted) / (unit + np.abs(wanted))))
            raise GateFailed(
                stage="network",
                what=f"ONNX and torch differ on {rows} random rows",
                found=f"by {worst:.3g}; export.tolerance allows {tolerance:g}",
            )


def _strip_traces(model: onnx.ModelProto) -> None:
    """Removes source paths and stack traces of this machine, which must not be published."""
    for message in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.graph.input):
        _clear(message)
    for message in (*model.graph.output, *model.graph.initializer):
        _clear(message)
    for function in model.functions:
        _clear(function)
        for node in function.node:
            _clear(node)


def _clear(message: Any) -> None:
    message.ClearField("doc_string")
    message.ClearField("metadata_props")


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Silences advice of the logger `name` ("" for all), such as that of exporters about packages and preprocessing
    that these graphs do not need."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
