"""Which requests of the Python backend are recorded, and with which ids (spool_writer.py writes them)."""

import json
import os

import numpy as np
from spool_blocks import Recorded
from spool_writer import SpoolWriter

# Headers of the gateway, which Triton passes on as parameters (serin/serving/triton/process.py).
_ID, _CLIENT_ID = "x-request-id", "x-serin-client-id"
_DTYPES = {
    "BYTES": np.dtype(object),
    "FP32": np.dtype(np.float32),
    "INT64": np.dtype(np.int64),
    "INT8": np.dtype(np.int8),
}


_NULLS = {"string": b"", "float": np.nan, "bool": -1, "int": -(2**63), "timestamp": -(2**63)}


class Recording:
    """`outputs`: names and dtypes in the order of the files. `hidden`: places of inputs that are recorded as null, and
    that value."""

    def __init__(self, writer, outputs, hidden):
        self._writer, self._outputs, self._hidden = writer, outputs, hidden

    def add(self, request, inputs, outputs, t):
        """Records a request that was scored, if its lot is drawn; one without the gateway's id (a probe, a warm-up)
        never is. Nothing is raised: no request may fail here."""
        try:
            parameters = json.loads(request.parameters())
            found = parameters.get(_ID)
            if not isinstance(found, str) or not self._writer.draws(found):
                return
            client_id = str(parameters.get(_CLIENT_ID) or request.request_id() or "")
        except (ValueError, AttributeError):  # parameters that are not UTF-8, or not an object
            return
        try:
            for place, null in self._hidden:
                inputs = [*inputs[:place], np.full_like(inputs[place], null), *inputs[place + 1 :]]
            values = [*inputs, *(_as_declared(outputs[name], dtype) for name, dtype in self._outputs)]
            self._writer.add(Recorded(t, found.encode(), client_id.encode(), len(inputs[0]), values))
        except (ValueError, TypeError, MemoryError):
            self._writer.drop()

    def close(self):
        self._writer.close()


def open_recording(settings, schema, log):
    """Returns the recording that the model's configuration asks for; None without a folder to write to."""
    folder = os.environ.get("SERIN_SPOOL")
    if not folder:
        return None
    outputs = [(output["name"], output["dtype"]) for output in schema["outputs"]]
    writer = SpoolWriter(
        folder,
        share=float(settings["record_share"]),
        limit_bytes=int(settings["record_limit_bytes"]),
        header=settings["record_header"].encode() + b"\n",
        is_text=[column["kind"] == "string" for column in schema["inputs"]]
        + [dtype == "BYTES" for _, dtype in outputs],
        log=log,
    )
    names = json.loads(settings["record_hidden"])
    hidden = [
        (place, _NULLS[column["kind"]])
        for place, column in enumerate(schema["inputs"])
        if column["name"] in names
    ]
    return Recording(writer, outputs, hidden)


def _as_declared(values, dtype):
    if values.dtype != _DTYPES[dtype]:
        raise ValueError(f"an output is {values.dtype} instead of {dtype}")
    if dtype != "BYTES":
        return values
    encoded = np.empty(values.size, dtype=object)  # ONNX Runtime's strings are str
    encoded[:] = [text.encode() for text in values.reshape(-1)]
    return encoded
