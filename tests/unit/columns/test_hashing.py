import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import helper

from serin.columns.hashing import hash_ints, hash_strings
from tests.unit.features.measured import run_model

TEXTS = ["", "a", "ab", "abc", "abcd", "hello, world", "ünïcödé €", "x" * 100, "日本"]
INTS = np.asarray([0, 1, -1, 2**63 - 1, -(2**63), 336_776], np.int64)


def test_known_hashes_of_texts() -> None:
    known = {"": 0, "a": 0x3C2569B2, "abc": 0xB3DD93FA, "hello, world": 0x149BBB7F}
    assert hash_strings(pa.array(list(known))).tolist() == list(known.values())


@pytest.mark.parametrize("values", [np.asarray(TEXTS, object), INTS], ids=["texts", "ints"])
def test_onnx_runtime_gives_the_same_hash(values: np.ndarray) -> None:
    element = onnx.TensorProto.STRING if values.dtype == object else onnx.TensorProto.INT64
    node = helper.make_node("MurmurHash3", ["x"], ["y"], domain="com.microsoft", positive=1, seed=0)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", element, ["n"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.UINT32, ["n"])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    (expected,) = run_model(helper.make_model(graph, opset_imports=opsets, ir_version=10), {"x": values})
    ours = hash_strings(pa.array(TEXTS)) if values.dtype == object else hash_ints(INTS)
    assert ours.tolist() == expected.tolist()


def test_a_slice_of_texts_is_hashed_by_its_own_bytes() -> None:
    assert hash_strings(pa.array(TEXTS)[3:6]).tolist() == hash_strings(pa.array(TEXTS[3:6])).tolist()


def test_no_texts_have_no_hashes() -> None:
    assert len(hash_strings(pa.array([], pa.string()))) == 0
