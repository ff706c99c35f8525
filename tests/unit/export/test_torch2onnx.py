import functools

import numpy as np
import onnx
import pytest
import torch

from serin.errors import ExportFailed, GateFailed
from serin.export.convert.torch2onnx import torch2onnx
from serin.export.session import open_session
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec

BOTH = TableShape(numeric=3, sizes=(5, 7), outputs=1)


@functools.cache
def exported(shape: TableShape) -> tuple[torch.nn.Module, onnx.ModelProto]:
    torch.manual_seed(1)
    module = build_model(ModelSpec(hidden=(8,), dropout=0.5), shape)
    return module, torch2onnx(module, shape)


@pytest.mark.parametrize(
    "shape",
    [
        BOTH,
        TableShape(numeric=2, sizes=(), outputs=3),
        TableShape(numeric=0, sizes=(4,), outputs=1),
    ],
    ids=["both", "numeric", "categorical"],
)
def test_a_network_answers_the_same_at_a_batch_size_that_was_not_tried(shape: TableShape) -> None:
    module, model = exported(shape)
    num = torch.randn(13, shape.numeric)
    cat = torch.stack([torch.randint(0, size, (13,)) for size in shape.sizes] or [torch.zeros(13)], dim=1)
    cat = cat[:, : len(shape.sizes)].long()
    (found,) = open_session(model).run(None, {"num": num.numpy(), "cat": cat.numpy()})
    np.testing.assert_allclose(found, module(num, cat).detach().numpy(), atol=1e-6)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 20


def test_nothing_of_this_machine_is_in_the_published_graph() -> None:
    content = exported(BOTH)[1].SerializeToString()
    assert b".py" not in content
    assert b"stack_trace" not in content
    assert not onnx.load_model_from_string(content).graph.node[0].metadata_props


class Forgetful(torch.nn.Module):
    """Answers something else each time."""

    def forward(self, num: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
        return num.sum(dim=1, keepdim=True) + torch.rand(()) * 100


class Unexportable(torch.nn.Module):
    def forward(self, num: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(num.T @ num).real[None, :1].expand(len(num), 1)


def test_a_graph_that_does_not_answer_as_its_module_is_refused() -> None:
    with pytest.raises(GateFailed, match="export gate, network"):
        torch2onnx(Forgetful(), TableShape(numeric=2, sizes=(3,), outputs=1))


def test_a_network_that_has_no_onnx_form_is_refused_with_one_line() -> None:
    with pytest.raises(ExportFailed, match="export of the network failed") as refusal:
        torch2onnx(Unexportable(), TableShape(numeric=2, sizes=(3,), outputs=1))
    assert "\n" not in str(refusal.value)
