"""Answers a batch of requests with one run of the bundle's ONNX graph, or of its front and then its core.

It runs inside Triton's Python, which has its own numpy and does not import serin. All requests are read, joined,
checked and scored at once. Only when something is wrong are they checked one by one: a request that cannot be scored
gets its own error and never fails those that share its batch, and the message names the column at fault and never a
path or a stack.
"""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

# ONNX Runtime's errors have no common base class.
_ORT_ERRORS = tuple(
    kind for kind in vars(ort_state).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
_SCORING_ERRORS = (*_ORT_ERRORS, ValueError, TypeError, RuntimeError, MemoryError)
_UNSCORABLE = "the model could not score this request; the server's log says why"
_DTYPES = {"string": object, "float": np.float32, "int": np.int64, "timestamp": np.int64, "bool": np.int8}
_PROVIDERS = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_CPU = "CPUExecutionProvider"


class BadRequest(Exception):
    """An error of one request, as a message for its sender."""


class TritonPythonModel:
    def initialize(self, args):
        """Opens the graphs beside this file. An error here fails the load, as it should."""
        folder = Path(args["model_repository"], args["model_version"])
        schema = json.loads((folder / "schema.json").read_text(encoding="utf-8"))
        self._inputs = [
            (
                column["name"],
                column["kind"],
                np.dtype(_DTYPES[column["kind"]]),
                tuple(column.get("dims", (1,))),
            )
            for column in schema["inputs"]
        ]
        self._names = [name for name, _, _, _ in self._inputs]
        parameters = json.loads(args["model_config"])["parameters"]
        settings = {key: value["string_value"] for key, value in parameters.items()}
        self._most_bytes = int(settings.get("max_string_bytes", 65_536))
        self._session = _open(folder, settings, int(args.get("model_instance_device_id", 0)))
        self._outputs = self._session.outputs

    def execute(self, requests):
        """Returns one response per request, in order."""
        responses = [None] * len(requests)
        readable, batch = [], []
        for position, request in enumerate(requests):
            try:
                batch.append(self._read(request))
                readable.append(position)
            except BadRequest as error:
                responses[position] = _refusal(str(error))
        if batch:
            for position, answer in zip(readable, self._answer(batch), strict=True):
                responses[position] = _response(answer) if isinstance(answer, dict) else answer
        return responses

    def _read(self, request):
        """Returns the request's arrays in the order of the columns, unchecked."""
        tensors = request.inputs()
        if [tensor.name() for tensor in tensors] == self._names:
            return [tensor.as_numpy() for tensor in tensors]
        known = {tensor.name(): tensor for tensor in tensors}
        for name in self._names:
            if name not in known:
                raise BadRequest(f"input '{name}' is missing")
        return [known[name].as_numpy() for name in self._names]

    def _answer(self, batch):
        """Returns the outputs by name for each request that was read, or an error response for one at fault."""
        try:
            feed = self._join(batch)
        except (BadRequest, ValueError, TypeError):
            return self._answer_sound(batch)
        except MemoryError as error:
            return self._answer_halves(batch, error)
        try:
            return self._score(batch, feed)
        except _SCORING_ERRORS as error:
            return self._answer_halves(batch, error)

    def _answer_halves(self, batch, error):
        """Splits the batch, so that the other requests do not fail with the one at fault."""
        if len(batch) > 1:
            half = len(batch) // 2
            return self._answer(batch[:half]) + self._answer(batch[half:])
        pb_utils.Logger.log_error(f"scoring failed: {type(error).__name__}: {error}")
        return [_failure(_UNSCORABLE)]

    def _answer_sound(self, batch):
        answers = [None] * len(batch)
        sound = []
        for position, arrays in enumerate(batch):
            try:
                self._check(arrays)
                self._join([arrays])
                sound.append(position)
            except BadRequest as error:
                answers[position] = _refusal(str(error))
        if sound:
            for position, answer in zip(sound, self._answer([batch[at] for at in sound]), strict=True):
                answers[position] = answer
        return answers

    def _join(self, batch):
        """Returns one array for each column.

        Raises BadRequest for an invalid value, and ValueError for arrays that do not fit, which `_check` explains.
        """
        feed, texts, rows = {}, [], sum(len(arrays[0]) for arrays in batch)
        for (name, kind, dtype, dims), parts in zip(self._inputs, zip(*batch, strict=True), strict=True):
            joined = parts[0] if len(batch) == 1 else np.concatenate(parts)
            if joined.dtype != dtype or joined.shape != (rows, *dims):
                raise ValueError(name)
            if kind == "string":
                texts.append((name, joined))
            elif (
                kind == "bool" and ((joined.view(np.uint8) + np.uint8(1)) > 2).any()
            ):  # -1, 0 and 1 become 0, 1, 2
                raise _no_bool(name, joined)
            feed[name] = joined
        if texts:
            self._decode(texts, feed)
        return feed

    def _decode(self, texts, feed):
        """Decodes all strings of all columns in one step."""
        flat = [joined.reshape(-1).tolist() for _, joined in texts]
        values = flat[0] if len(flat) == 1 else list(chain.from_iterable(flat))
        whole = b"\0".join(values)
        try:
            decoded = whole.decode().split("\0")
        except UnicodeDecodeError:
            raise _no_text(texts) from None
        if len(decoded) != len(values):  # some contain the separator themselves
            decoded = [value.decode() for value in values]
        if len(whole) > self._most_bytes and max(map(len, values)) > self._most_bytes:
            raise _too_long(texts, self._most_bytes)
        at = 0
        for name, joined in texts:
            column = np.empty(joined.size, dtype=object)
            column[:] = decoded[at : at + joined.size]
            feed[name] = column.reshape(joined.shape)
            at += joined.size

    def _check(self, arrays):
        """Raises BadRequest for arrays of another type or shape than the columns'. Triton itself lets none of them
        pass."""
        rows = None
        for (name, _, dtype, dims), values in zip(self._inputs, arrays, strict=True):
            if values.dtype != dtype:
                raise BadRequest(f"input '{name}' holds {values.dtype}, the model asks for {dtype}")
            if values.shape[1:] != dims or not values.ndim:
                asked = ", ".join(map(str, ("rows", *dims)))
                raise BadRequest(
                    f"input '{name}' has shape {list(values.shape)}, the model asks for [{asked}]"
                )
            rows = len(values) if rows is None else rows
            if len(values) != rows:
                raise BadRequest(
                    f"input '{name}' has {len(values)} rows, input '{self._names[0]}' has {rows}"
                )

    def _score(self, batch, feed):
        outputs = self._session.run(self._outputs, feed)
        if len(batch) == 1:
            return [dict(zip(self._outputs, outputs, strict=True))]
        counts = [len(arrays[0]) for arrays in batch]
        if any(len(output) != sum(counts) for output in outputs):
            raise ValueError(f"{sum(counts)} rows were answered with {[len(output) for output in outputs]}")
        answers, start = [], 0
        for count in counts:
            own = [output[start : start + count] for output in outputs]
            answers.append(dict(zip(self._outputs, own, strict=True)))
            start += count
        return answers


class _Graph:
    """A graph in its own session, on the CPU or an accelerator."""

    def __init__(self, path, settings, provider, device):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(settings["ort_threads"])
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = [_CPU]
        if provider != "cpu":
            onnxruntime.preload_dlls()  # CUDA's libraries from packages beside ONNX Runtime, where they are
            providers = [(_PROVIDERS[provider], _provider_options(provider, settings, device)), _CPU]
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        if provider != "cpu" and _PROVIDERS[provider] not in session.get_providers():
            raise RuntimeError(f"{_PROVIDERS[provider]} does not start here; its libraries are missing")
        self._session = session
        self.inputs = [tensor.name for tensor in session.get_inputs()]
        self.outputs = [tensor.name for tensor in session.get_outputs()]
        types = {tensor.type for tensor in session.get_inputs()}
        self._bound = provider != "cpu" and "tensor(string)" not in types  # ONNX Runtime cannot bind strings

    def run(self, outputs, feed):
        if not self._bound:
            return self._session.run(outputs, feed)
        binding = self._session.io_binding()
        for name in self.inputs:
            binding.bind_cpu_input(name, np.ascontiguousarray(feed[name]))
        for name in outputs:
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()


class _FrontAndCore:
    """The front's outputs are the core's inputs, by name."""

    def __init__(self, front, core):
        self._front, self._core = front, core
        self.outputs = core.outputs

    def run(self, outputs, feed):
        between = self._front.run(self._core.inputs, feed)
        return self._core.run(outputs, dict(zip(self._core.inputs, between, strict=True)))


def _open(folder, settings, device):
    """Opens the graphs that the configuration names: one, or a front for the CPU and a core for the accelerator."""
    names = settings.get("graphs", "model.onnx").split()
    provider = settings.get("provider", "cpu")
    if len(names) == 1:
        return _Graph(folder / names[0], settings, provider, device)
    front = _Graph(folder / names[0], settings, "cpu", device)
    return _FrontAndCore(front, _Graph(folder / names[1], settings, provider, device))


def _provider_options(provider, settings, device):
    options = {"device_id": device}
    if provider == "cuda" and "gpu_mem_limit" in settings:
        options["gpu_mem_limit"] = int(settings["gpu_mem_limit"])
        options["arena_extend_strategy"] = "kSameAsRequested"
    return options


def _response(outputs):
    tensors = [pb_utils.Tensor(name, values) for name, values in outputs.items()]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _no_bool(name, joined):
    values = joined.reshape(-1)
    row = np.flatnonzero((values < -1) | (values > 1))[0]
    return BadRequest(f"input '{name}': row {row} is {values[row]}; a bool is 0 or 1, or -1 for null")


def _no_text(texts):
    for name, joined in texts:
        for row, value in enumerate(joined.reshape(-1)):
            try:
                value.decode()
            except UnicodeDecodeError:
                return BadRequest(f"input '{name}': row {row} is not UTF-8")
    raise AssertionError("what cannot be decoded whole cannot be decoded in parts")


def _too_long(texts, most):
    for name, joined in texts:
        for row, value in enumerate(joined.reshape(-1)):
            if len(value) > most:
                return BadRequest(
                    f"input '{name}': row {row} has {len(value)} bytes; at most {most} are taken"
                )
    raise AssertionError("one of them is too long")


def _refusal(message):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))


def _failure(message):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL))
