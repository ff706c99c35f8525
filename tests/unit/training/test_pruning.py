"""Units that count for nothing can go without a trace; what is cut is really smaller."""

from __future__ import annotations

import pytest
import torch

from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.training.programs.pruning import prune
from tests.fakes.small_pipeline import small_spec

SHAPE = TableShape(numeric=3, sizes=(7, 40), outputs=2)


@pytest.mark.parametrize("kind", ["mlp", "dcn"])
def test_a_network_without_its_idle_units_answers_the_same(kind: str) -> None:
    torch.manual_seed(1)
    model = ModelSpec(kind=kind, hidden=(12, 9), dropout=0.1)  # type: ignore[arg-type]
    network = build_model(model, SHAPE).eval()
    idle = {"layers.0": (0, 3, 4, 7, 8, 11), "layers.3": (1, 2, 5, 8)}
    with torch.no_grad():
        for layer, units in idle.items():
            network.get_submodule(layer).weight[list(units)] = 0
            network.get_submodule(layer).bias[list(units)] = 0
    num, cat = torch.randn(50, 3), torch.randint(0, 7, (50, 2))

    smaller, state = prune(model, network.state_dict(), 0.5)
    cut = build_model(smaller, SHAPE).eval()
    cut.load_state_dict(state)

    assert smaller.hidden == (6, 5)
    assert torch.allclose(cut(num, cat), network(num, cat), atol=1e-6)
    assert sum(p.numel() for p in cut.parameters()) < sum(p.numel() for p in network.parameters())


def test_the_weakest_units_go_and_one_always_stays() -> None:
    torch.manual_seed(2)
    model = ModelSpec(hidden=(4,))
    network = build_model(model, SHAPE)
    with torch.no_grad():
        network.get_submodule("head").weight[:, 2] = 50.0

    smaller, state = prune(model, network.state_dict(), 0.99)

    assert smaller.hidden == (1,)
    assert torch.equal(state["layers.0.weight"], network.get_submodule("layers.0").weight[2:3])
    assert state["head.weight"].shape == (2, 1)


def test_what_has_no_hidden_layers_is_not_pruned(tmp_path) -> None:  # type: ignore[no-untyped-def]
    given = small_spec(tmp_path, rows=300, model={"kind": "xgboost"}, training={"prune": {"share": 0.5}})

    with pytest.raises(Exception, match=r"training\.prune: model\.kind xgboost does not use it.*mlp, dcn"):
        load_spec(given)
