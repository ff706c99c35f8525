"""Builds a network from a model section, with random or trained weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from serin.formats.weights import read_weights
from serin.models.dcn import Dcn
from serin.models.ensemble import Ensemble
from serin.models.foreign.module import OwnNetwork
from serin.models.ft_transformer import FtTransformer
from serin.models.mlp import Mlp
from serin.models.shape import TableShape
from serin.models.state import load_state
from serin.models.tabm import TabM
from serin.spec.model import ModelSpec


def build_model(spec: ModelSpec, shape: TableShape) -> nn.Module:
    """Returns a network with random weights, drawn from torch's global generator: seed it first."""
    if spec.ensemble_size == 1:
        return _one(spec, shape)
    without_unit = replace(shape, units=False)
    return Ensemble((_one(spec, without_unit) for _ in range(spec.ensemble_size)), shape)


def load_model(folder: Path) -> nn.Module:
    """Returns the trained network of a result folder, on the CPU, ready to score."""
    weights = read_weights(folder)
    shape = TableShape(
        numeric=weights.shape.numeric,
        sizes=weights.shape.sizes,
        outputs=weights.shape.outputs,
        units=weights.model.task == "regression",
    )
    network = build_model(weights.model.model, shape)
    load_state(network, weights.state)
    return network.eval()


def _one(spec: ModelSpec, shape: TableShape) -> nn.Module:
    match spec.kind:
        case "mlp":
            return Mlp(spec, shape)
        case "dcn":
            return Dcn(spec, shape)
        case "ft_transformer":
            return FtTransformer(spec, shape)
        case "tabm":
            return TabM(spec, shape)
        case "module":
            return OwnNetwork(spec, shape)
        case "xgboost" | "auto" | "script" | "onnx":
            raise ValueError(f"{spec.kind} is not one of Serin's networks")
