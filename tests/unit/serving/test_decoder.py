"""The compiled decoder of recorded requests reads what a plain one in Python reads."""

import ctypes
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from serin.formats.schema import ELSEWHERE, KIND_OF_DTYPE, DType, InputColumn, OutputTensor, Schema
from serin.formats.serving.recorded import NUMBERS, RecordedBlock, Strings, Values
from serin.formats.serving.ring import GRPC
from serin.monitoring.capture.columns import block_rows
from tests.kit.decoding import built_decoder
from tests.kit.rings import Exchange, json_answer, json_request, wire
from tests.unit.serving.plain_decoder import CONTENTS, Unreadable, rows_of

SCHEMA = Schema(
    task="binary",
    inputs=(
        InputColumn(name="carrier", dtype="BYTES", kind="string"),
        InputColumn(name="temp", dtype="FP32", kind="float"),
        InputColumn(name='dist"é', dtype="INT64", kind="int"),
        InputColumn(name="night", dtype="INT8", kind="bool"),
        InputColumn(name="pixels", dtype="FP32", kind="float", dims=(2, 3)),
    ),
    outputs=(
        OutputTensor(name="score", dtype="FP32", dims=(1,)),
        OutputTensor(name="words", dtype="BYTES", dims=(2,)),
        OutputTensor(name="label", dtype="INT64", dims=(1,)),
    ),
)
WIDTHS = {each.name: math.prod(each.dims) for each in (*SCHEMA.inputs, *SCHEMA.outputs)}
TYPES = {each.name: each.dtype for each in (*SCHEMA.inputs, *SCHEMA.outputs)}


def decode(
    exchanges: Sequence[Exchange], hidden: Sequence[str] = (), schema: Schema = SCHEMA
) -> RecordedBlock:
    buffers = [ctypes.create_string_buffer(each.encode(), len(each.encode())) for each in exchanges]
    return built_decoder()(schema, hidden, [ctypes.addressof(each) for each in buffers])


def listed(values: Values) -> list[Any]:
    if isinstance(values, Strings):
        return values.to_arrow().to_pylist()
    if values.dtype == np.float32:
        return [each.tobytes() for each in values]
    return values.tolist()


def same(one: list[Any] | None, other: list[Any] | None, dtype: str) -> bool:
    """Equal, bit by bit but for the bits of NaN."""
    if one is None or other is None or dtype != "FP32":
        return one == other
    pairs = zip(one, other, strict=True)
    return len(one) == len(other) and all(
        x == y or (math.isnan(struct.unpack("<f", x)[0]) and math.isnan(struct.unpack("<f", y)[0]))
        for x, y in pairs
    )


def check(exchanges: Sequence[Exchange], hidden: Sequence[str] = ()) -> None:
    """Compares both decoders on all entries together."""
    inputs: dict[str, list[Any]] = {each.name: [] for each in SCHEMA.inputs if each.name not in hidden}
    outputs: list[dict[str, Any]] = []
    good = []
    for exchange in exchanges:
        try:
            sent, answered = rows_of(exchange, SCHEMA, set(hidden))
        except Unreadable:
            continue
        good.append(exchange)
        outputs.append(answered)
        for name, values in sent.items():
            inputs[name] += values
    block = decode(exchanges, hidden)
    assert sum(block.faults.values()) == len(exchanges) - len(good), block.faults
    assert block.ids.to_arrow().to_pylist() == [each.id for each in good]
    for column, values in zip(SCHEMA.inputs, block.inputs, strict=True):
        assert (values is None) == (column.name in hidden)
        if values is not None:
            assert same(listed(values), inputs[column.name], column.dtype), column.name
    ends = np.cumsum(block.request_rows.tolist(), dtype=np.int64).tolist()
    for output, values, there in zip(SCHEMA.outputs, block.outputs, block.given, strict=True):
        assert there.tolist() == [each[output.name] is not None for each in outputs]
        width, flat, start = math.prod(output.dims), listed(values), 0
        for end, each in zip(ends, outputs, strict=True):
            if each[output.name] is not None:
                assert same(flat[start * width : end * width], each[output.name], output.dtype)
            start = end


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.one_of(
    st.floats(width=32),
    st.floats(),
    st.integers(-(10**25), 10**25),
    st.decimals(allow_nan=False, allow_infinity=False),
)
integers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-200, 200))


def numbers_of(dtype: str) -> st.SearchStrategy[Any]:
    return {"BYTES": texts, "FP32": floats, "INT64": integers, "INT8": st.sampled_from([-1, 0, 1])}[dtype]


@st.composite
def tensors(draw: st.DrawFn, names: Sequence[str], rows: int) -> dict[str, tuple[str, list[int], list[Any]]]:
    """Columns with values of their types."""
    found = {}
    for name in draw(st.permutations(names)):
        count = rows * WIDTHS[name]
        values = draw(st.lists(numbers_of(TYPES[name]), min_size=count, max_size=count))
        dims = {"pixels": [2, 3], "words": [2]}.get(name, [1])
        found[name] = TYPES[name], [rows, *dims], values
    return found


def written(dtype: str, values: list[Any], nulls: list[bool], nested: int, rows: int) -> str:
    """A JSON list, with nulls, numbers as clients write them, and lists in lists."""
    words = [
        "null" if null else json.dumps(value, ensure_ascii=len(value) % 2 == 0) if isinstance(value, str)
        else str(value) if not isinstance(value, float) else json.dumps(value)
        for value, null in zip(values, nulls, strict=True)
    ]  # fmt: skip
    if nested and rows:
        width = len(words) // rows
        words = [f"[{', '.join(words[start : start + width])}]" for start in range(0, len(words), width)]
    return f"[{' , '.join(words) if nested > 1 else ','.join(words)}]"


@st.composite
def json_exchanges(draw: st.DrawFn) -> Exchange:
    rows = draw(st.integers(0, 3))
    inputs = draw(st.sets(st.sampled_from([each.name for each in SCHEMA.inputs]), min_size=1).map(sorted))
    outputs = draw(st.sets(st.sampled_from([each.name for each in SCHEMA.outputs])).map(sorted))

    def body(columns: dict[str, Any], which: str, asked: str = "") -> bytes:
        parts = []
        for name, (dtype, shape, values) in columns.items():
            nulls = draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
            data = written(dtype, values, nulls, draw(st.integers(0, 2)), rows)
            fields = [
                f'"name": {json.dumps(name)}',
                f'"datatype":"{dtype}"',
                f'"shape":{shape}',
                f'"data":{data}',
            ]
            parts.append("{" + ",".join(draw(st.permutations(fields))) + "}")
        extra = draw(st.sampled_from(["", '"id":"a\\"b",', '"parameters":{"x":[1,{"y":"]"}]},']))
        return ("{" + extra + asked + f'"{which}":[{",".join(parts)}]' + "}").encode()

    classes = [
        f'{{"name":"{name}","parameters":{{"classification":1}}}}' for name in outputs if draw(st.booleans())
    ]
    asked = f'"outputs":[{",".join(classes)}],' if classes else ""
    request = body(draw(tensors(inputs, rows)), "inputs", asked)
    answer = body(draw(tensors(outputs, rows)), "outputs")
    return Exchange(request=request, answer=answer, t=1.0, id=draw(st.sampled_from(["a", "b"])))


@st.composite
def binary_exchanges(draw: st.DrawFn) -> Exchange:
    """JSON and binary tensors behind it; some tensors in JSON."""
    rows = draw(st.integers(0, 3))

    def body(which: str, names: list[str]) -> tuple[bytes, int]:
        columns, entries, behind = draw(tensors(names, rows)), [], b""
        for name, (dtype, shape, values) in columns.items():
            entry: dict[str, Any] = {"name": name, "datatype": dtype, "shape": shape}
            if draw(st.integers(0, 4)):
                raw = wire(dtype, values)[: draw(st.sampled_from([10**9] * 9 + [3]))]
                entry["parameters"] = {"binary_data_size": len(raw)}
                behind += raw
            else:
                entry["data"] = [float(each) if dtype == "FP32" else each for each in values]
            entries.append(entry)
        head = json.dumps({which: entries}).encode()
        return head + behind, len(head)

    request, length = body("inputs", [each.name for each in SCHEMA.inputs])
    answer, answer_length = body("outputs", [each.name for each in SCHEMA.outputs])
    return Exchange(request=request, answer=answer, t=1.0, request_json=length, answer_json=answer_length)


@st.composite
def grpc_exchanges(draw: st.DrawFn) -> Exchange:
    rows = draw(st.integers(0, 3))
    request, answer = service_pb2.ModelInferRequest(model_name="m"), service_pb2.ModelInferResponse()

    def fill(into: Any, raw: Any, names: list[str]) -> None:
        is_raw = draw(st.booleans())
        for name, (dtype, shape, values) in draw(tensors(names, rows)).items():
            tensor = into.add(name=name, datatype=dtype, shape=shape)
            plain = [each.encode() if dtype == "BYTES" else each for each in values]
            if dtype == "FP32":
                plain = np.frombuffer(wire(dtype, values), np.float32).tolist()
            if is_raw:
                raw.append(wire(dtype, values))
            else:
                getattr(tensor.contents, CONTENTS[dtype]).extend(plain)

    inputs = draw(st.sets(st.sampled_from([each.name for each in SCHEMA.inputs]), min_size=1).map(sorted))
    fill(request.inputs, request.raw_input_contents, inputs)
    fill(answer.outputs, answer.raw_output_contents, [each.name for each in SCHEMA.outputs])
    if draw(st.booleans()):
        request.outputs.add(name="words").parameters["classification"].int64_param = 2
    return Exchange(
        request=request.SerializeToString(), answer=answer.SerializeToString(), t=1.0, protocol=GRPC, grpc=0
    )


hiding = st.sets(st.sampled_from([each.name for each in SCHEMA.inputs])).map(sorted)


@pytest.mark.parametrize("kind", [json_exchanges, binary_exchanges, grpc_exchanges])
def test_it_reads_what_a_plain_decoder_reads(kind: Any) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.lists(kind(), min_size=1, max_size=4), hiding)
    def compare(exchanges: list[Exchange], hidden: list[str]) -> None:
        check(exchanges, hidden)

    compare()


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(json_exchanges(), binary_exchanges(), grpc_exchanges()),
    st.integers(0, 10**6),
    st.binary(min_size=1, max_size=6),
    st.booleans(),
)
def test_damaged_bytes_are_read_completely_or_not_at_all(
    exchange: Exchange, place: int, damage: bytes, cut: bool
) -> None:
    bodies = {"request": exchange.request, "answer": exchange.answer}
    name = sorted(bodies)[place % 2]
    at = place % (len(bodies[name]) + 1)
    behind = b"" if cut else bodies[name][at + len(damage) :]
    broken = replace(exchange, **{name: bodies[name][:at] + damage + behind})
    good = Exchange(request=json_request({"night": ("BOOL", [1, 1], [True])}), answer=json_answer({}), t=2.0)
    block = decode([good, broken, good])
    assert block.requests + sum(block.faults.values()) == 3
    rows = block.rows
    for column, values in zip(SCHEMA.inputs, block.inputs, strict=True):
        assert values is not None
        assert len(values) == rows * WIDTHS[column.name]
    for output, found, there in zip(SCHEMA.outputs, block.outputs, block.given, strict=True):
        assert (len(found), len(there)) == (rows * WIDTHS[output.name], block.requests)
    night = listed(block.inputs[3])  # type: ignore[arg-type]
    assert (night[0], night[-1]) == (1, 1)


def test_an_entry_has_the_clients_id_or_that_of_the_request() -> None:
    body = json_request({"night": ("INT8", [1, 1], [1])}, id='of "the" body\u00e9')
    own = Exchange(request=body, answer=json_answer({}), t=1.0, client_id="x" * 200)
    message = service_pb2.ModelInferRequest(id="of the message")
    message.inputs.add(name="night", datatype="INT8", shape=[1, 1]).contents.int_contents.append(0)
    call = Exchange(request=message.SerializeToString(), answer=b"", t=1.0, protocol=GRPC)
    block = decode([own, replace(own, client_id=""), call])
    assert block.client_ids.to_arrow().to_pylist() == ["x" * 128, 'of "the" bodyé', "of the message"]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"[]", "the request cannot be read"),
        (json_request({"night": ("INT8", [1, 1], [1])})[:-1], "the request cannot be read"),
        (json_request({"night": ("INT8", [1, 1], [300])}), "the request has other inputs than the model's"),
        (json_request({"night": ("INT8", [2, 1], [1])}), "the request has other inputs than the model's"),
        (json_request({"night": ("FP32", [1, 1], [1])}), "the request has other inputs than the model's"),
        (json_request({"night": ("INT8", [10**9, 1], [1])}), "the request has other inputs than the model's"),
        (json_request({"other": ("INT8", [1, 1], [1])}), "the request has other inputs than the model's"),
        (b'{"inputs":[{"name":"night","name":"night"}]}', "the request cannot be read"),
    ],
)
def test_a_request_that_is_not_the_models_is_counted_with_its_reason(request_: bytes, reason: str) -> None:
    block = decode([Exchange(request=request_, answer=json_answer({}), t=1.0)])
    assert (block.requests, dict(block.faults)) == (0, {reason: 1})


@pytest.mark.parametrize(
    "rest",
    [
        '"data":[0]}]}', ' "data" : [0], "parameters": {} }]}', '"parameters":{"x":[1]},"data":[0]}]}',
        '"name":"night","data":[1]}]}', '"shape":[1,1],"data":[1]}]}', '"datatype":"INT8","data":[1]}]}',
        '"data":[1],"data":[1]}]}', '"data":[1,1]}]}', '"data":[1]}', "}]}", "]}", "",
        '"data":[0]},{"name":"night","datatype":"INT8","shape":[1,1],"data":[0]}]}',
    ],
)  # fmt: skip
def test_a_request_is_read_alike_alone_and_behind_one_that_begins_like_it(rest: str) -> None:
    begins = '{"inputs":[{"name":"night","datatype":"INT8","shape":[1,1],'
    first, second = (
        Exchange(request=(begins + each).encode(), answer=json_answer({}), t=1.0)
        for each in ('"data":[1]}]}', rest)
    )
    alone, behind = decode([second]), decode([first, second])
    assert (behind.requests, behind.faults) == (alone.requests + 1, alone.faults)
    night = listed(alone.inputs[3])  # type: ignore[arg-type]
    assert listed(behind.inputs[3]) == [1, *night]  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.floats(allow_nan=False, allow_infinity=False).map(repr),
            st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
            st.from_regex(r"-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,20})?", fullmatch=True),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_numbers_are_the_nearest_to_what_their_digits_say(words: list[str]) -> None:
    schema = replace(SCHEMA, outputs=(OutputTensor(name="x", dtype="FP64", dims=(len(words),)),))
    request = json_request({"night": ("INT8", [1, 1], [1])})
    answer = f'{{"outputs":[{{"name":"x","datatype":"FP64","shape":[1,{len(words)}],"data":[{",".join(words)}]}}]}}'
    (found,) = decode([Exchange(request=request, answer=answer.encode(), t=1.0)], schema=schema).outputs
    assert isinstance(found, np.ndarray)
    assert found.tobytes() == np.array([float(word) for word in words]).tobytes()


FIELDS = {
    "BOOL": "bool_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"), "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"), "UINT64": "uint64_contents",
}  # fmt: skip
"""gRPC's typed values. FP16 has none, and no form in JSON: it travels in binary alone."""


def values_of(dtype: DType) -> list[Any]:
    """Two values, as large and as small as they may be."""
    if dtype == "BYTES":
        return ["a", "é"]
    kind = np.dtype(NUMBERS[dtype])
    if kind.kind == "b":
        return [True, False]
    limits: Any = np.finfo(kind) if kind.kind == "f" else np.iinfo(kind)
    return [limits.min.item() if kind.kind == "f" else limits.min, min(int(limits.max), 2**63 - 1)]


@pytest.mark.parametrize("form", ["json", "binary", "grpc", "grpc raw"])
@pytest.mark.parametrize("dtype", KIND_OF_DTYPE)
def test_each_type_of_a_server_elsewhere_is_decoded(dtype: DType, form: str) -> None:
    values = values_of(dtype)
    column = InputColumn(name="x", dtype=dtype, kind=KIND_OF_DTYPE[dtype], source=ELSEWHERE)
    output = OutputTensor(name="y", dtype=dtype, dims=(1,))
    schema = Schema(task="regression", inputs=(column,), outputs=(output,))
    if dtype == "BYTES":
        raw = b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in values)
    else:
        values = [each.item() for each in np.array(values).astype(NUMBERS[dtype])]
        raw = np.array(values).astype(NUMBERS[dtype]).tobytes()
    request, answer = service_pb2.ModelInferRequest(model_name="m"), service_pb2.ModelInferResponse()
    for name, tensors_in, contents in (
        ("x", request.inputs, request.raw_input_contents),
        ("y", answer.outputs, answer.raw_output_contents),
    ):
        tensor = tensors_in.add(name=name, datatype=dtype, shape=[2, 1])
        if form == "grpc raw":
            contents.append(raw)
        elif dtype in FIELDS:
            plain = [each.encode() for each in values] if dtype == "BYTES" else values
            getattr(tensor.contents, FIELDS[dtype]).extend(plain)
    exchange = Exchange(
        request=request.SerializeToString(), answer=answer.SerializeToString(), t=1.0, protocol=GRPC, grpc=0
    )
    if form in ("json", "binary"):
        (sent, length), (got, answer_length) = (
            _http(which, name, dtype, values, raw if form == "binary" else None)
            for which, name in (("inputs", "x"), ("outputs", "y"))
        )
        exchange = Exchange(request=sent, answer=got, t=1.0, request_json=length, answer_json=answer_length)
    block = decode([exchange], schema=schema)
    if dtype == "FP16" and form in ("json", "grpc"):
        assert sum(block.faults.values()) == 1, block.faults
        return
    assert not block.faults
    for found in (block.inputs[0], block.outputs[0]):
        assert found is not None
        assert listed(found) == listed(
            found if isinstance(found, Strings) else np.array(values, NUMBERS[dtype])
        )
        assert isinstance(found, Strings) or found.tolist() == values
    recorded = block_rows("m-v1", schema, block)
    assert recorded.column("x").null_count == 0 or dtype == "INT64", "the smallest one is null"


def _http(which: str, name: str, dtype: str, values: list[Any], raw: bytes | None) -> tuple[bytes, int]:
    tensor: dict[str, Any] = {"name": name, "datatype": dtype, "shape": [2, 1]}
    tensor |= {"data": values} if raw is None else {"parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({which: [tensor]}).encode()
    return head + (raw or b""), len(head)


def test_an_input_without_a_null_that_is_left_out_is_a_fault_and_shifts_nothing() -> None:
    """The type has no value that means null."""
    columns = [InputColumn(name=name, dtype="INT32", kind="int", source=ELSEWHERE) for name in ("x", "z")]
    schema = Schema(
        task="regression", inputs=tuple(columns), outputs=(OutputTensor(name="y", dtype="FP32", dims=(1,)),)
    )
    answer, _ = _http("outputs", "y", "FP32", [0.5, 0.25], None)

    def sent(*names: str) -> Exchange:
        inputs = [{"name": name, "datatype": "INT32", "shape": [2, 1], "data": [7, 8]} for name in names]
        return Exchange(request=json.dumps({"inputs": inputs}).encode(), answer=answer, t=1.0)

    block = decode([sent("x"), sent("x", "z")], schema=schema)
    assert sum(block.faults.values()) == 1
    assert [None if each is None else listed(each) for each in block.inputs] == [[7, 8], [7, 8]]
