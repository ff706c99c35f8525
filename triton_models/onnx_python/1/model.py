"""Answers a batch of requests with one run of the bundle's ONNX graph.

Runs inside Triton's Python, which has its own numpy and knows nothing of serin. A request that cannot be scored is
answered with an error of its own; it never fails the requests that share its batch, and what a client reads names the
column at fault and never a path or a stack.
"""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

# ONNX Runtime's errors share no base class of their own.
_ORT_ERRORS = tuple(
    kind for kind in vars(ort_state).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
_SCORING_ERRORS = (*_ORT_ERRORS, ValueError, TypeError, RuntimeError, MemoryError)
_UNSCORABLE = "the model could not score this request; the server's log says why"


class BadRequest(Exception):
    """What is wrong with one request, in words for its sender."""


class TritonPythonModel:
    def initialize(self, args):
        """Open the graph beside this file. An error here fails the load, which is what should happen."""
        folder = Path(args["model_repository"], args["model_version"])
        schema = json.loads((folder / "schema.json").read_text(encoding="utf-8"))
        self._inputs = [
            (column["name"], column["kind"], tuple(column.get("dims", (1,)))) for column in schema["inputs"]
        ]
        parameters = json.loads(args["model_config"])["parameters"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(parameters["ort_threads"]["string_value"])
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._outputs = [output.name for output in self._session.get_outputs()]

    def execute(self, requests):
        """One response per request, in order."""
        responses = [None] * len(requests)
        readable, batches = [], []
        for position, request in enumerate(requests):
            try:
                batches.append(self._read(request))
                readable.append(position)
            except BadRequest as error:
                responses[position] = _refusal(str(error))
        if batches:
            for position, response in zip(readable, self._answer(batches), strict=True):
                responses[position] = response
        return responses

    def _read(self, request):
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        columns = []
        for name, kind, dims in self._inputs:
            if name not in tensors:
                raise BadRequest(f"input '{name}' is missing")
            values = tensors[name].as_numpy()
            if kind == "string":
                columns.append(_decoded(name, values.reshape(-1)))
            else:
                columns.append(_checked(name, kind, values.reshape(-1)).reshape(-1, *dims))
        return columns

    def _answer(self, batches):
        try:
            outputs = self._score(batches)
        except _SCORING_ERRORS as error:
            if len(batches) > 1:  # find the one at fault: the others must not pay for it
                return [self._answer([batch])[0] for batch in batches]
            pb_utils.Logger.log_error(f"scoring failed: {type(error).__name__}: {error}")
            return [_failure(_UNSCORABLE)]
        if len(batches) == 1:
            return [self._response(outputs)]
        ends = np.cumsum([len(batch[0]) for batch in batches])[:-1]
        parts = [np.split(output, ends) for output in outputs]
        return [self._response(part) for part in zip(*parts, strict=True)]

    def _score(self, batches):
        feed = {}
        for position, (name, kind, dims) in enumerate(self._inputs):
            columns = [batch[position] for batch in batches]
            if kind == "string":
                joined = np.array(list(chain.from_iterable(columns)), dtype=object)
            else:
                joined = columns[0] if len(columns) == 1 else np.concatenate(columns)
            feed[name] = joined.reshape(-1, *dims)
        return self._session.run(self._outputs, feed)

    def _response(self, outputs):
        tensors = [pb_utils.Tensor(name, values) for name, values in zip(self._outputs, outputs, strict=True)]
        return pb_utils.InferenceResponse(output_tensors=tensors)


def _decoded(name, values):
    try:
        return list(map(bytes.decode, values))
    except UnicodeDecodeError:
        row = next(row for row, value in enumerate(values) if not _is_utf8(value))
        raise BadRequest(f"input '{name}': row {row} is not UTF-8") from None


def _is_utf8(value):
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _checked(name, kind, values):
    if kind == "bool":
        wrong = np.flatnonzero((values < -1) | (values > 1))
        if wrong.size:
            raise BadRequest(
                f"input '{name}': row {wrong[0]} is {values[wrong[0]]}; a bool is 0 or 1, or -1 for null"
            )
    return values


def _refusal(message):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))


def _failure(message):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL))
