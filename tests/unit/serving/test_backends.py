"""Which backend serves what: a table of servers, bundles and wishes."""

from dataclasses import replace

import pytest

from serin.errors import BackendRefused
from serin.formats.bundle import CORE, FRONT, MODEL, PLAN, TREES
from serin.serving.triton.backends import Contents, Server, choose_backend
from serin.spec.serving import ServingSpec

WHEEL = Server()
WITH_NATIVE = Server(backends=frozenset({"python", "serin_onnx"}), accelerators=frozenset({"cuda"}))
NO_CUDA = replace(WITH_NATIVE, no_cuda="CUDA's libraries cannot be loaded")
WHEEL_CUDA = Server(accelerators=frozenset({"cuda"}))
CONTAINER = Server(
    backends=frozenset({"python", "onnxruntime", "tensorrt", "fil"}),
    accelerators=frozenset({"cuda", "tensorrt"}),
)
BOTH = replace(CONTAINER, backends=CONTAINER.backends | WITH_NATIVE.backends)
NO_FRONT = Server(backends=frozenset({"tensorrt", "fil"}))
NETWORK = Contents(model="delays version 3", files=frozenset({MODEL}), task="binary")
FOR_GPU = replace(NETWORK, files=frozenset({MODEL, FRONT, CORE}))
WITH_PLAN = replace(NETWORK, files=frozenset({MODEL, FRONT, CORE, PLAN}), plan_rows=256)
TREE = replace(NETWORK, files=frozenset({MODEL, FRONT, CORE, TREES}))
NARROW = replace(FOR_GPU, empty="features/cat")
STRINGS = replace(FOR_GPU, strings_out="label")
CLASSES = replace(TREE, task="multiclass", answers=3)


@pytest.mark.parametrize(
    ("contents", "server", "wish", "gpus", "backend", "place"),
    [
        (NETWORK, WHEEL, {}, 0, "onnx_python", "cpu"),
        (NETWORK, WITH_NATIVE, {}, 0, "onnx_native", "cpu"),
        (NETWORK, WITH_NATIVE, {"backend": "onnx_python"}, 0, "onnx_python", "cpu"),
        (NETWORK, WITH_NATIVE, {"device": "gpu"}, 1, "onnx_python", "gpu"),
        (FOR_GPU, WITH_NATIVE, {}, 1, "onnx_native", "gpu"),
        (FOR_GPU, WITH_NATIVE, {"backend": "onnx_native"}, 1, "onnx_native", "gpu"),
        (NETWORK, WITH_NATIVE, {"backend": "onnx_native"}, 1, "onnx_native", "cpu"),
        (FOR_GPU, WITH_NATIVE, {"device": "cpu"}, 1, "onnx_native", "cpu"),
        (FOR_GPU, WITH_NATIVE, {"backend": "onnx_python"}, 1, "onnx_python", "gpu"),
        (FOR_GPU, BOTH, {}, 1, "onnx_native", "gpu"),
        (FOR_GPU, BOTH, {"accelerator": "tensorrt"}, 1, "ensemble", "gpu"),
        (FOR_GPU, NO_CUDA, {}, 1, "onnx_python", "gpu"),
        (STRINGS, WITH_NATIVE, {}, 1, "onnx_python", "gpu"),
        (NARROW, WITH_NATIVE, {}, 1, "onnx_native", "gpu"),
        (TREE, WITH_NATIVE, {}, 1, "onnx_native", "cpu"),
        (NETWORK, CONTAINER, {}, 0, "onnxruntime", "cpu"),
        (NETWORK, CONTAINER, {}, 4, "onnxruntime", "cpu"),  # exported for the CPU
        (NETWORK, CONTAINER, {"device": "gpu"}, 1, "onnxruntime", "gpu"),
        (NETWORK, WHEEL_CUDA, {"device": "gpu"}, 1, "onnx_python", "gpu"),
        (NETWORK, CONTAINER, {"backend": "onnx_python"}, 0, "onnx_python", "cpu"),
        (FOR_GPU, WHEEL, {}, 0, "onnx_python", "cpu"),
        (FOR_GPU, WHEEL, {}, 1, "onnx_python", "cpu"),  # a Python without CUDA
        (FOR_GPU, WHEEL_CUDA, {}, 1, "onnx_python", "gpu"),
        (FOR_GPU, WHEEL_CUDA, {"device": "cpu"}, 1, "onnx_python", "cpu"),
        (FOR_GPU, CONTAINER, {}, 1, "ensemble", "gpu"),
        (FOR_GPU, CONTAINER, {"accelerator": "tensorrt"}, 1, "ensemble", "gpu"),
        (FOR_GPU, CONTAINER, {"backend": "onnxruntime"}, 1, "onnxruntime", "gpu"),
        (FOR_GPU, WHEEL, {"backend": "ensemble"}, 1, "ensemble", "cpu"),
        (FOR_GPU, WHEEL_CUDA, {"backend": "ensemble"}, 1, "ensemble", "gpu"),
        (WITH_PLAN, CONTAINER, {"max_batch_rows": 256}, 1, "tensorrt_plan", "gpu"),
        (WITH_PLAN, CONTAINER, {"max_batch_rows": 257}, 1, "ensemble", "gpu"),
        (WITH_PLAN, CONTAINER, {}, 0, "onnxruntime", "cpu"),
        (TREE, CONTAINER, {}, 1, "fil", "gpu"),
        (TREE, CONTAINER, {"backend": "fil"}, 0, "fil", "cpu"),
        (TREE, WHEEL_CUDA, {}, 1, "onnx_python", "cpu"),  # ONNX Runtime has no trees for a GPU
        (CLASSES, CONTAINER, {}, 1, "onnxruntime", "cpu"),
        (NARROW, CONTAINER, {}, 1, "onnx_python", "gpu"),
    ],
)
def test_the_first_shape_that_can_is_taken(
    contents: Contents, server: Server, wish: dict[str, object], gpus: int, backend: str, place: str
) -> None:
    choice = choose_backend(contents, server, ServingSpec.model_validate(wish), gpus)
    assert (choice.backend, choice.place) == (backend, place), choice.reason
    assert choice.reason
    assert (choice.front is None) == (backend in ("onnx_native", "onnx_python", "onnxruntime"))


@pytest.mark.parametrize(
    ("contents", "server", "why"),
    [
        (FOR_GPU, NO_CUDA, "onnx_native: CUDA's libraries cannot be loaded"),
        (FOR_GPU, WHEEL_CUDA, "onnx_native: the server has no serin_onnx backend; it has python"),
        (STRINGS, WITH_NATIVE, "onnx_native: its output 'label' holds strings"),
    ],
)
def test_a_gpu_release_in_the_python_backend_says_why_it_is_not_in_serin_s_own(
    contents: Contents, server: Server, why: str
) -> None:
    choice = choose_backend(contents, server, ServingSpec(), 1)
    assert (choice.backend, choice.place) == ("onnx_python", "gpu")
    assert why in choice.reason


@pytest.mark.parametrize(
    ("contents", "server", "wish", "gpus", "words"),
    [
        (NETWORK, WHEEL, {"backend": "onnx_native"}, 0, "has no serin_onnx backend; it has python"),
        (
            NETWORK,
            WITH_NATIVE,
            {"backend": "onnx_native", "device": "gpu"},
            1,
            "needs front.onnx and core.onnx",
        ),
        (NETWORK, WHEEL, {"backend": "onnxruntime"}, 0, "has no onnxruntime backend; it has python"),
        (
            NETWORK,
            CONTAINER,
            {"backend": "ensemble"},
            1,
            "no front.onnx and no core.onnx .*export.target: gpu",
        ),
        (NETWORK, CONTAINER, {"backend": "fil"}, 1, "no front.onnx and no trees.ubj"),
        (NETWORK, WHEEL, {"device": "gpu"}, 0, r"this machine has 0 GPU\(s\)"),
        (NETWORK, CONTAINER, {"gpus": 3}, 2, r"serving.gpus: 3: this machine has 2 GPU\(s\)"),
        (NETWORK, WHEEL, {"device": "gpu"}, 1, "onnx_python: the ONNX Runtime of its Python has no provider"),
        (FOR_GPU, NO_FRONT, {"backend": "ensemble"}, 1, "front needs the onnxruntime or the python backend"),
        (WITH_PLAN, WHEEL, {"backend": "tensorrt_plan", "max_batch_rows": 8}, 1, "no tensorrt backend"),
        (WITH_PLAN, CONTAINER, {"backend": "tensorrt_plan", "max_batch_rows": 8}, 0, "an engine needs a GPU"),
        (WITH_PLAN, CONTAINER, {"backend": "tensorrt_plan"}, 1, "max_batch_rows=1024 is beyond the 256 rows"),
        (TREE, WHEEL, {"backend": "fil"}, 1, "no fil backend"),
        (TREE, WHEEL_CUDA, {"device": "gpu"}, 1, "fil: the server has no fil backend"),
        (CLASSES, CONTAINER, {"backend": "fil"}, 1, "one output per row"),
        (
            NARROW,
            CONTAINER,
            {"backend": "ensemble"},
            1,
            "'features/cat' between front and core has no columns",
        ),
        (NETWORK, Server(backends=frozenset()), {}, 0, "it has none.*serin install triton"),
    ],
)
def test_what_was_named_and_cannot_be_is_refused_with_the_reason(
    contents: Contents, server: Server, wish: dict[str, object], gpus: int, words: str
) -> None:
    with pytest.raises(BackendRefused, match=words) as refused:
        choose_backend(contents, server, ServingSpec.model_validate(wish), gpus)
    assert refused.value.fields["model"] == "delays version 3"
