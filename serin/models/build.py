"""From a model section to a network, fresh or with trained weights."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from serin.formats.weights import read_weights
from serin.models.mlp import Mlp
from serin.models.shape import TableShape
from serin.spec.stages import ModelSpec


def build_model(spec: ModelSpec, shape: TableShape) -> nn.Module:
    """A network with fresh weights, drawn from torch's global generator: seed it first."""
    match spec.kind:
        case "mlp":
            return Mlp(spec, shape)


def load_model(folder: Path) -> nn.Module:
    """The trained network of a result folder, on the CPU, ready to score."""
    weights = read_weights(folder)
    shape = TableShape(
        numeric=weights.model.shape.numeric,
        sizes=weights.model.shape.sizes,
        outputs=weights.model.shape.outputs,
    )
    network = build_model(weights.model.model, shape)
    network.load_state_dict(weights.state)
    return network.eval()
