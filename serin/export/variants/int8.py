"""Quantises a network to 8-bit integers.

Static: the ranges of all values come from training rows (QDQ, per channel). Dynamic: the ranges are computed per batch,
so that a row's score depends on the other rows of its batch.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx

from serin.formats.wire import Array

_CALIBRATION_BATCH_ROWS = 256
_LAYERS = ("Gemm", "MatMul")


def to_int8(network: onnx.ModelProto, rows: Mapping[str, Array]) -> onnx.ModelProto | str:
    """Returns a static quantisation calibrated on `rows` (num and cat of training rows), or why it is impossible."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    if reason := _unfit(network):
        return reason
    with _files(network) as (source, target), _quiet():
        quantize_static(
            source,
            target,
            _reader(rows),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=[*_LAYERS, "Gather", "Relu"],
        )
        return _read(target)


def to_int8_dynamic(network: onnx.ModelProto) -> onnx.ModelProto | str:
    """Returns integer weights with values quantised per batch, or why it is impossible."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    if reason := _unfit(network):
        return reason
    with _files(network) as (source, target), _quiet():
        quantize_dynamic(source, target, per_channel=True, weight_type=QuantType.QInt8)
        return _read(target)


def _unfit(network: onnx.ModelProto) -> str:
    if any(node.op_type in _LAYERS for node in network.graph.node):
        return ""
    return "it has no layers with weights to quantise"


def _reader(rows: Mapping[str, Array]) -> object:
    from onnxruntime.quantization import CalibrationDataReader

    count = len(rows["num"])
    batches = iter(
        [
            {name: values[at : at + _CALIBRATION_BATCH_ROWS] for name, values in rows.items()}
            for at in range(0, count, _CALIBRATION_BATCH_ROWS)
        ]
    )

    class Rows(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Array] | None:
            return next(batches, None)

    return Rows()


@contextmanager
def _files(network: onnx.ModelProto) -> Iterator[tuple[str, str]]:
    """Writes the network to a file for the quantiser. It infers shapes itself: it changes layers without correcting
    them."""
    copy = onnx.ModelProto()
    copy.CopyFrom(network)
    del copy.graph.value_info[:]
    with tempfile.TemporaryDirectory(prefix="serin-int8-") as folder:
        source, target = Path(folder, "network.onnx"), Path(folder, "quantised.onnx")
        source.write_bytes(copy.SerializeToString())
        yield str(source), str(target)


def _read(path: str) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.load_model_from_string(Path(path).read_bytes())
    model.producer_name, model.producer_version = "serin", ""
    del model.metadata_props[:]
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the quantiser's advice to preprocess, which concerns graphs with unknown shapes."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
