"""Releases that record their requests, on real Tritons behind a real Envoy, and clients that know what they sent."""

import http.client
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper
from tritonclient.grpc import service_pb2

from serin.cluster.version_settings import model_timeouts, stored_timeouts
from serin.formats.bundle import write_manifest
from serin.formats.schema import OutputTensor, Schema, write_schema
from serin.formats.serving.recorded import Strings
from serin.formats.serving.ring import Ring, ring_files
from serin.formats.wire import Array
from serin.serving.client.tensors import (
    HEADER_BYTES,
    encode,
    http_body,
    read_http_answer,
)
from serin.serving.envoy.gateway import Gateway
from serin.serving.triton.releases import Releases
from serin.store.artifacts import ModelRoute, Release
from serin.store.store import Store
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.serving_stack import end_all, start_gateway
from tests.kit.decoding import built_decoder
from tests.kit.load import INFER_METHOD, grpc_message
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

OUTPUTS = (
    OutputTensor(name="score", dtype="FP32", dims=(1,)),
    OutputTensor(name="pair", dtype="FP32", dims=(2,)),
    OutputTensor(name="word", dtype="BYTES", dims=(1,)),
)
SCHEMA = Schema(task="binary", inputs=bundles.SCHEMA.inputs, outputs=OUTPUTS)


@dataclass(frozen=True, slots=True)
class Row:
    """What one row's client sent and got."""

    client_id: str
    sent: tuple[Any, ...]
    got: tuple[Any, ...]


@dataclass
class Recorder:
    """Sends requests to one release of a gateway and remembers them by the gateway's id."""

    port: int
    release: Release
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)

    def json(self, columns: Mapping[str, Array], **headers: str) -> str:
        inputs = [
            {"name": each.name, "datatype": each.dtype, "shape": columns[each.name].shape,
             "data": _json_safe(columns[each.name])}
            for each in SCHEMA.inputs
        ]  # fmt: skip
        own = {"id": headers.pop("kserve")} if "kserve" in headers else {}
        own |= {"parameters": {"x-request-id": "forged"}}
        return self._http(json.dumps({**own, "inputs": inputs}).encode(), columns, headers)

    def binary(self, columns: Mapping[str, Array], **headers: str) -> str:
        body, length = http_body(encode(columns, SCHEMA))
        return self._http(body, columns, {**headers, HEADER_BYTES: str(length)})

    def grpc(self, columns: Mapping[str, Array], **headers: str) -> str:
        message = grpc_message(MODEL, encode(columns, SCHEMA), self.release.version)
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            call = channel.unary_unary(
                INFER_METHOD, response_deserializer=service_pb2.ModelInferResponse.FromString
            )
            answer, known = call.with_call(message, timeout=30, metadata=list(_named(headers).items()))
        outputs = {}
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
            text = json.dumps(
                {"outputs": [{"name": output.name, "datatype": output.datatype, "shape": list(output.shape),
                              "parameters": {"binary_data_size": len(raw)}}]}
            ).encode()  # fmt: skip
            outputs |= read_http_answer(text + raw, len(text))
        found = dict(known.initial_metadata())["x-request-id"]
        return self._remember(found, columns, outputs, headers.get("x_request_id", ""))

    def _http(self, body: bytes, columns: Mapping[str, Array], headers: Mapping[str, str]) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            path = f"/v2/models/{MODEL}/versions/{self.release.version}/infer"
            connection.request("POST", path, body, _named(headers))
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status == 200, data
            length = answer.getheader(HEADER_BYTES)
            outputs = read_http_answer(data, int(length) if length else None)
            found = answer.getheader("x-request-id")
        finally:
            connection.close()
        assert found is not None
        own = headers.get("x_request_id", "") or json.loads(body).get("id", "") if not length else ""
        return self._remember(found, columns, outputs, headers.get("x_request_id", own))

    def _remember(
        self, found: str, columns: Mapping[str, Array], outputs: Mapping[str, Array], client_id: str
    ) -> str:
        inputs = [_plain(columns[column.name]) for column in SCHEMA.inputs]
        answers = [_plain(outputs[output.name]) for output in OUTPUTS]
        rows = len(inputs[0])
        for number in range(rows):
            sent = tuple(values[number] for values in inputs)
            got = tuple(values[number] for values in answers)
            self.rows[found, number] = Row(client_id, sent, got)
        return found


@dataclass
class RecordingStack:
    """`folder`: the home, in memory, in which the gateway leaves its rings."""

    folder: Path
    host: ChildHost
    store: Store
    releases: Releases
    gateway: Gateway
    port: int
    by_name: dict[str, Release]

    def recorder(self, name: str) -> Recorder:
        return Recorder(self.port, self.by_name[name])

    @contextmanager
    def entries(self, release: Release) -> Iterator[list[int]]:
        """The addresses of the release's entries that wait in the rings."""
        rings, found = [Ring(path) for path in ring_files(self.folder)], list[int]()
        try:
            for ring in rings:
                waiting, _ = ring.read(ring.tail)
                for each in waiting:
                    found += (ring.address + each.place).tolist() if each.release == release.name else []
            yield found
        finally:
            for ring in rings:
                ring.close()

    def recorded(self, release: Release) -> dict[tuple[str, int], Row]:
        """All recorded rows by id and row number."""
        with self.entries(release) as entries:
            block = built_decoder()(SCHEMA, (), entries)
        assert not block.faults
        assert all(given.all() for given in block.given)
        rows, found = int(block.request_rows.sum()), dict[tuple[str, int], Row]()
        columns = [_flat(values, rows) for values in (*block.inputs, *block.outputs)]
        at = 0
        for id_, client_id, count in zip(
            block.ids.to_arrow().to_pylist(),
            block.client_ids.to_arrow().to_pylist(),
            block.request_rows.tolist(),
            strict=True,
        ):
            for number in range(count):
                values = tuple(column[at + number] for column in columns)
                assert (id_, number) not in found, "recorded twice"
                found[id_, number] = Row(
                    client_id, values[: len(SCHEMA.inputs)], values[len(SCHEMA.inputs) :]
                )
            at += count
        return found

    def wait_for_requests(self, release: Release, count: int) -> None:
        def there() -> bool:
            with self.entries(release) as entries:
                return len(entries) >= count

        wait_for(f"{count} recorded requests", there, self.host, release.name, within_s=30)

    def bring_up(self, release: Release) -> None:
        self.releases.start(release)
        wait_for(release.name, lambda: self.releases.state(release) == "ready", self.host, release.name)

    def route(self) -> None:
        """Every release answers calls that name its version, and is recorded as its spec asks."""
        releases = list(self.by_name.values())
        endpoints = {release.name: self.releases.endpoint(release) for release in releases}
        route = ModelRoute(model=MODEL, epoch=1, stable=releases[0], candidate=None, candidate_percent=0)
        limits = model_timeouts(stored_timeouts(self.store), releases)
        self.gateway.apply([route], endpoints, {MODEL: replace(limits, request_s=30.0)})


@contextmanager
def recording_stack(**specs: str) -> Iterator[RecordingStack]:
    """`specs`: a name and a spec for each release."""
    folder, host = Path(tempfile.mkdtemp(prefix="serin-e2e-", dir="/dev/shm")), ChildHost()
    (folder / "stack").mkdir()
    (folder / "stack" / "sockets").symlink_to(folder)
    store = Store(str(folder / "store"))
    releases = Releases(folder / "releases", host=host, store=store, devices=lambda: ())
    try:
        by_name = {name: publish(store, spec) for name, spec in specs.items()}
        for release in by_name.values():
            releases.start(release)
        gateway, port = start_gateway(folder, host)
        stack = RecordingStack(folder, host, store, releases, gateway, port, by_name)
        for release in by_name.values():
            stack.bring_up(release)
        stack.route()
        yield stack
    finally:
        end_all(host, releases, folder)


def publish(store: Store, spec: str) -> Release:
    """A version whose outputs are a number, two numbers and a string."""
    version = store.reserve_version(MODEL)
    with store.workspace() as folder:
        model = bundles.graph(0.5)
        model.graph.node.extend(
            [
                helper.make_node("Concat", ["score", "filled"], ["pair"], axis=1),
                helper.make_node("Identity", ["carrier"], ["word"]),
            ]
        )
        model.graph.output.extend(
            [
                helper.make_tensor_value_info("pair", TensorProto.FLOAT, ["batch", 2]),
                helper.make_tensor_value_info("word", TensorProto.STRING, ["batch", 1]),
            ]
        )
        onnx.save(model, folder / "model.onnx")
        write_schema(folder, SCHEMA)
        (folder / "spec.yaml").write_text(spec)
        write_manifest(
            folder, name=MODEL, model_version=version, spec_digest="0" * 64, lineage={}, metrics={}
        )
        bundle = store.publish_bundle(MODEL, version, folder)
    return Release(model=bundle.model, version=bundle.version)


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def _json_safe(values: Array) -> list[Any]:
    return [None if value != value else value for value in values.reshape(-1).tolist()]


def _plain(values: Array) -> list[Any]:
    """Rows as values that compare equal when their bits are equal."""
    if values.dtype == object:
        return [v.decode() if isinstance(v, bytes) else v for v in values.reshape(-1).tolist()]
    return [row.tobytes() for row in np.ascontiguousarray(values)]


def _flat(values: Any, rows: int) -> list[Any]:
    if isinstance(values, Strings):
        return list(values.to_arrow().to_pylist())
    return _plain(values.reshape(rows, -1))
