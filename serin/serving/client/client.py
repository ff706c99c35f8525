"""Calls a served model over HTTP or gRPC.

    with Client("http://127.0.0.1:8080", "flight-delays") as model:
        scores = model.predict(frame)["score"]

Any other client of the Open Inference Protocol can do the same.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa

from serin.errors import ClientIdRefused, PredictionFailed, RowsUnfit, nearest
from serin.formats.schema import NULL_OF_KIND, InputColumn, Kind, OutputTensor, Schema
from serin.formats.serving.request import CLIENT_ID_BYTES
from serin.formats.wire import Array, as_arrow, to_wire
from serin.serving.client.address import Address
from serin.serving.client.tensors import encode
from serin.serving.client.transports import ID_HEADER, GrpcTransport, HttpTransport, Unanswered

if TYPE_CHECKING:
    import pandas as pd

Protocol = Literal["http", "grpc"]
T = TypeVar("T")

_NUMPY = {"BYTES": np.object_, "FP32": np.float32, "INT64": np.int64, "INT8": np.int8}
_KINDS: Mapping[str, Kind] = {"BYTES": "string", "FP32": "float", "INT64": "int", "INT8": "bool"}
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0


class Answers(dict[str, Array]):
    """The model's outputs by name, one row of each for every row given.

    `request_id`: for each row, the id that the gateway gave the request that carried it. `request_row`: the row's
    number in that request. Labels that arrive later are joined by these two.
    """

    def __init__(self, outputs: Mapping[str, Array], request_id: Array, request_row: Array) -> None:
        super().__init__(outputs)
        self.request_id, self.request_row = request_id, request_row


class Client:
    """One model behind a gateway. Threads may share it; connections are reused.

    `version` calls that release and no other, outside of a rollout. `api_key` is sent as a bearer token. A request that
    nobody answered, or that was answered with an overload, is sent again up to `retries` times, all within `timeout_s`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        protocol: Protocol = "http",
        version: int | None = None,
        api_key: str | None = None,
        ca: Path | str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        connections: int = 8,
        batch_rows: int = 256,
    ) -> None:
        self.model, self.version = model, version
        self._timeout_s, self._retries, self._batch_rows = timeout_s, retries, batch_rows
        self._address = Address.parse(url, ca=ca)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._transport = (
            HttpTransport(self._address, model, version, self._headers, connections)
            if protocol == "http"
            else GrpcTransport(self._address, model, version, self._headers)
        )
        self._tensors: dict[str, Any] | None = None
        self._events: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def predict(
        self,
        rows: pd.DataFrame | pa.Table | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        client_id: str | None = None,
    ) -> Answers:
        """Returns the model's outputs by name, one row of each for every row given.

        Rows are a frame, a table, a dict of columns or a list of dicts. RowsUnfit names a column that does not fit;
        PredictionFailed has the server's message. `client_id`: the caller's id, which logs and recorded requests
        keep beside the gateway's; ClientIdRefused is raised for one that they would not keep.
        """
        table = as_arrow(_table(rows))
        schema = self._schema(table)
        return self.predict_wire(to_wire(table, schema), schema, client_id=client_id)

    def predict_wire(
        self, columns: Mapping[str, Array], schema: Schema, *, client_id: str | None = None
    ) -> Answers:
        """Returns the same for columns that are already in wire form."""
        headers = {} if client_id is None else {ID_HEADER: _kept_id(client_id)}
        parts = list(_batches(request_columns(columns, schema), self._batch_rows))
        answers = [self._try(partial(self._transport.infer, encode(part, schema), headers)) for part in parts]
        counts = [len(next(iter(part.values()))) for part in parts]
        ids = np.array([answer.request_id for answer in answers], dtype=object).repeat(counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        try:
            outputs = {
                output.name: np.concatenate([answer.outputs[output.name] for answer in answers])
                for output in schema.outputs
            }
        except KeyError as error:
            reason = f"its answer lacks the output {error}"
            raise PredictionFailed(model=self.model, status="OK", reason=reason) from error
        return Answers(outputs, ids, numbers)

    def _schema(self, table: pa.Table) -> Schema:
        """Returns the model's tensors as its server names them; whether an INT64 is a time can only be seen in the
        rows."""
        if self._tensors is None:
            self._tensors = self._try(self._transport.metadata)
        kinds = {field.name: field.type for field in table.schema}
        inputs = tuple(_column(entry, kinds.get(entry["name"])) for entry in self._tensors["inputs"])
        if not {column.name for column in inputs} <= kinds.keys():
            inputs = self._sent(inputs)
        outputs = tuple(
            OutputTensor(name=entry["name"], dtype=entry["datatype"], dims=_dims(entry))
            for entry in self._tensors["outputs"]
        )
        return Schema(task="regression", inputs=inputs, outputs=outputs)

    def _sent(self, inputs: tuple[InputColumn, ...]) -> tuple[InputColumn, ...]:
        """Returns the columns to send where the gateway adds windows over past events: those of an event as well, and
        not the windows. The same as given for other models."""
        if self._events is None:
            http = HttpTransport(self._address, self.model, None, self._headers, 1)  # also beside gRPC
            with closing(http):
                self._events = self._try(http.events)
        event = [InputColumn.from_json(entry) for entry in self._events.get("inputs", ())]
        known = {column.name for column in event}
        own = (column for column in inputs if column.name not in known | {*self._events.get("adds", ())})
        return (*own, *event)

    def _try(self, ask: Callable[[float], T]) -> T:
        end = time.monotonic() + self._timeout_s
        wait_s = _FIRST_WAIT_S
        for retry in range(self._retries + 1):
            try:
                return ask(max(end - time.monotonic(), 0.001))
            except Unanswered as error:
                pause_s = wait_s * random.uniform(0.5, 1.5)
                asked_s = error.after_s * random.uniform(1.0, 1.25)  # spreads the retries of clients
                if time.monotonic() + asked_s < end:
                    pause_s = max(pause_s, asked_s)
                late = time.monotonic() + pause_s >= end
                if not error.again or retry == self._retries or late:
                    tries = f" (asked {retry + 1} times)" if retry else ""
                    raise PredictionFailed(
                        model=self.model, status=error.status, reason=error.reason + tries
                    ) from error
            time.sleep(pause_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("the last try returns or raises")


def predict(
    url: str,
    model: str,
    rows: Mapping[str, Array],
    schema: Schema,
    protocol: Protocol = "http",
    version: int | None = None,
    *,
    timeout_s: float = 10.0,
    batch_rows: int = 256,
) -> Answers:
    """Returns the model's outputs for `rows` (wire form), sent `batch_rows` at a time on a new connection, without
    retries."""
    client = Client(
        url, model, protocol=protocol, version=version, timeout_s=timeout_s, retries=0, batch_rows=batch_rows
    )
    with closing(client):
        return client.predict_wire(rows, schema)


def request_columns(rows: Mapping[str, Array], schema: Schema) -> dict[str, Array]:
    """The schema's columns of `rows` as [rows, *dims] arrays of wire types; RowsUnfit names one that does not fit."""
    columns: dict[str, Array] = {}
    for column in schema.inputs:
        if column.name not in rows:
            raise RowsUnfit(column=column.name, reason=f"is missing{nearest(column.name, rows)}")
        columns[column.name] = np.asarray(rows[column.name], dtype=_NUMPY[column.dtype])
        columns[column.name] = columns[column.name].reshape(-1, *column.dims)
        if len(columns[column.name]) != len(columns[schema.inputs[0].name]):
            raise RowsUnfit(column=column.name, reason="has another number of rows than the first column")
    return columns


def _kept_id(client_id: str) -> str:
    """Refuses an id that the gateway would remove or cut, and with it what could end a header's line."""
    if len(client_id) <= CLIENT_ID_BYTES and re.fullmatch("[!-~]([ -~]*[!-~])?", client_id):
        return client_id
    raise ClientIdRefused(client_id=client_id, most=CLIENT_ID_BYTES)


def _batches(columns: Mapping[str, Array], size: int) -> Iterator[dict[str, Array]]:
    count = len(next(iter(columns.values())))
    for start in range(0, max(count, 1), size):
        yield {name: values[start : start + size] for name, values in columns.items()}


def _table(rows: Any) -> Any:
    """Converts rows to a table. A list of dicts may leave keys out, which are then null; a dict has columns, or one
    plain row."""
    try:
        if isinstance(rows, Mapping):
            one = not any(isinstance(values, (list, tuple, np.ndarray, pa.Array)) for values in rows.values())
            return pa.Table.from_pylist([dict(rows)]) if one else pa.table(dict(rows))
        if isinstance(rows, Sequence):
            names = dict.fromkeys(name for row in rows for name in row)
            return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, TypeError, AttributeError) as error:
        raise RowsUnfit(column="", reason=f"cannot be read as columns: {error}") from error
    return rows


def _column(entry: Mapping[str, Any], kind_given: pa.DataType | None) -> InputColumn:
    dtype = entry["datatype"]
    if dtype not in _KINDS:
        reason = f"is {dtype} on the server, which this client does not send; use NVIDIA's tritonclient"
        raise RowsUnfit(column=entry["name"], reason=reason)
    kind = _KINDS[dtype]
    if dtype == "INT64" and kind_given is not None and _is_time(kind_given):
        kind = "timestamp"
    return InputColumn(name=entry["name"], dtype=dtype, kind=kind, null=NULL_OF_KIND[kind], dims=_dims(entry))


def _is_time(kind: pa.DataType) -> bool:
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(text or pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _dims(entry: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in entry["shape"][1:])
