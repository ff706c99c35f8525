"""Converts a trained network to an ONNX graph: `num` float32[batch, k], `cat` int64[batch, m] to `logits`
float32[batch, n].

The graph is compared with the module before it is returned, and contains no trace of the machine it was made on.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from serin.errors import ExportFailed, GateFailed
from serin.export.convert.quiet import quiet
from serin.formats.external_data import LIMIT_BYTES, large_tensors
from serin.models.foreign.module import OwnNetwork
from serin.models.shape import TableShape
from serin.models.table import Divisible
from serin.scoring.session import open_session

OPSET = 20
# 1 because exporters tend to hard-code it, 7 because it is not a power of two.
VERIFIED_BATCHES = (1, 2, 7, 64)
_INPUTS, _OUTPUT = ["num", "cat"], "logits"
_Rows = tuple[torch.Tensor, torch.Tensor]


def torch2onnx(
    module: torch.nn.Module, shape: TableShape, *, tolerance: float = 1e-4, weights: Path | None = None
) -> onnx.ModelProto:
    """Returns the module's graph, validated on random rows. Raises GateFailed when it does not agree with the
    module. `weights`: the file of its weights, to which the graph refers when they are too large for it."""
    module, large = module.eval(), large_tensors(weights) if weights else {}
    rows = _random_rows(shape, 3)  # not 1: a batch of one would be taken for a constant
    try:
        with quiet("torch.onnx"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _trace(module, rows, large) if _is_own(module) else _capture(module, rows, large)
    except torch.onnx.OnnxExporterError as error:
        raise ExportFailed(what="the network", reason=str(error).strip().splitlines()[0]) from error
    _strip_traces(model)
    _verify(module, model, shape, tolerance)
    return model


def _is_own(module: torch.nn.Module) -> bool:
    """Whether the network is Serin's, without any part of a user's."""
    return isinstance(module, Divisible) and not any(
        isinstance(part, OwnNetwork) for part in module.modules()
    )


def _trace(module: torch.nn.Module, rows: _Rows, large: Mapping[str, onnx.TensorProto]) -> onnx.ModelProto:
    """Records one run of a network that does the same for all rows. It takes a tenth of a second, torch.export takes
    seconds: it loads a compiler. With large weights all of them are inputs of what is recorded, which stays small."""
    with tempfile.TemporaryDirectory(prefix="serin-onnx-") as folder:
        file = Path(folder, "network.onnx")
        torch.onnx.export(
            module,
            rows,
            file,
            dynamo=False,
            export_params=not large,
            do_constant_folding=not large,
            keep_initializers_as_inputs=bool(large),  # else equal ones become one, under one of their names
            opset_version=OPSET,
            input_names=_INPUTS,
            output_names=[_OUTPUT],
            dynamic_axes={name: {0: "batch"} for name in (*_INPUTS, _OUTPUT)},
        )
        model = onnx.load_model(file)
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(values.numpy().dtype), ["batch", values.shape[1]]
        )
        for name, values in zip(_INPUTS, rows, strict=True)
    ]
    del model.graph.input[:]  # one without columns is left out by the exporter
    model.graph.input.extend(inputs)
    if large:
        used = {name for node in model.graph.node for name in node.input}
        for name, tensor in module.state_dict().items():
            if name in used:
                inside = None if name in large else numpy_helper.from_array(tensor.numpy(), name)
                model.graph.initializer.append(inside or large[name])
    return model


def _capture(module: torch.nn.Module, rows: _Rows, large: Mapping[str, onnx.TensorProto]) -> onnx.ModelProto:
    """Refuses a user's network whose path depends on the values of the rows: one run would not show all of it."""
    from onnxscript import ir  # here, because it takes seconds to import

    batch = torch.export.Dim("batch", min=1, max=2**30)
    program = torch.onnx.export(
        module,
        rows,
        dynamo=True,
        opset_version=OPSET,
        input_names=_INPUTS,
        output_names=[_OUTPUT],
        dynamic_shapes=({0: batch}, {0: batch}),
        external_data=False,
        verbose=False,
    )
    assert program is not None
    referred = {name: value for name, value in program.model.graph.initializers.items() if name in large}
    for value in referred.values():
        value.const_value = ir.tensor([0.0])  # until the graph refers to it
    kept = [value.const_value for value in program.model.graph.initializers.values()]
    rest = sum(int(tensor.nbytes) for tensor in kept if tensor is not None)
    if rest > LIMIT_BYTES:
        reason = f"the graph needs {rest / 1e9:.1f} GB of weights in another form than they were trained in"
        raise ExportFailed(what="the network", reason=reason)
    model = program.model_proto
    for tensor in model.graph.initializer:
        if tensor.name in referred:
            tensor.CopyFrom(large[tensor.name])
    return model


def _random_rows(shape: TableShape, rows: int) -> _Rows:
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
