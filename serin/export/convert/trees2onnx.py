"""Converts XGBoost's trees to an ONNX graph: `num` float32[batch, k], `cat` int64[batch, m] to `logits` float32[batch,
n].

It is one TreeEnsemble operator (ai.onnx.ml 5), written from XGBoost's own JSON: thresholds, leaves, sets of categories
and the direction of missing values are copied unchanged, in float32. Only the order in which leaves are summed may
differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from serin.columns.onnx_graph import GraphBuilder
from serin.errors import ExportFailed
from serin.formats.schema import Task
from serin.models.shape import TableShape
from serin.models.trees import base_scores, column_types

ML_OPSET = 5
_BELOW, _MEMBER = 1, 6  # TreeEnsemble's names for x < split and x in set
_SUM, _AS_IS = 1, 0
_FIRST_CODE = 1  # ONNX Runtime tests membership in one operation when all members are from 1 to 30
_LEAF = -1  # XGBoost's child of a node that has none


def trees2onnx(trees: Mapping[str, Any], shape: TableShape, task: Task) -> onnx.ModelProto:
    """Converts `trees`, the model as XGBoost's JSON. Raises ExportFailed without trees, or with trees of another
    table."""
    try:
        learner = trees["learner"]
        model = learner["gradient_booster"]["model"]
        columns = int(learner["learner_model_param"]["num_feature"])
        base = _base(base_scores(learner), task, shape.outputs)
        targets = [int(target) for target in model["tree_info"]]
        forest = _Forest()
        for tree, target in zip(model["trees"], targets, strict=True):
            forest.add(tree, target)
    except (KeyError, TypeError, ValueError) as error:
        raise ExportFailed(what="the trees", reason=f"{type(error).__name__}: {error}") from error
    if columns != shape.numeric + len(shape.sizes):
        reason = f"they need {columns} columns, but the table has {shape.numeric + len(shape.sizes)}"
        raise ExportFailed(what="the trees", reason=reason)
    return _graph(forest, base, shape)


def parse_trees(booster: Any) -> dict[str, Any]:
    """Returns a booster as the JSON that XGBoost itself writes."""
    document: dict[str, Any] = json.loads(bytes(booster.save_raw("json")))
    return document


def summed(trees: Mapping[str, Any]) -> tuple[int, np.ndarray[Any, np.dtype[np.float32]]]:
    """Returns how many leaves make a score, and the base score that is added to them."""
    learner = trees["learner"]
    return len(learner["gradient_booster"]["model"]["trees"]), base_scores(learner)


_End = tuple[int, int]  # the index of a child, and whether that is a leaf


@dataclass(slots=True)
class _Forest:
    """TreeEnsemble's attributes, filled tree by tree."""

    roots: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    splits: list[float] = field(default_factory=list)
    missing_true: list[int] = field(default_factory=list)
    true_ends: list[_End] = field(default_factory=list)
    false_ends: list[_End] = field(default_factory=list)
    members: list[float] = field(default_factory=list)  # the sets of all splits by category, NaN after each
    leaf_targets: list[int] = field(default_factory=list)
    leaf_weights: list[float] = field(default_factory=list)

    def add(self, tree: Mapping[str, Any], target: int) -> None:
        left, right = tree["left_children"], tree["right_children"]
        inner = [node for node, child in enumerate(left) if child != _LEAF]
        ends: dict[int, _End] = {node: (len(self.columns) + at, 0) for at, node in enumerate(inner)}
        self.roots.append(len(self.columns))
        for node, child in enumerate(left):
            if child == _LEAF:
                ends[node] = (len(self.leaf_weights), 1)
                self.leaf_targets.append(target)
                self.leaf_weights.append(tree["split_conditions"][node])
        if not inner:  # a root that is a leaf: a comparison whose outcome does not matter
            self._ask(0, _BELOW, 0.0, 0, ends[0], ends[0])
        sets = _category_sets(tree)
        for node in inner:
            column, to_left, to_right = tree["split_indices"][node], ends[left[node]], ends[right[node]]
            default_left = int(tree["default_left"][node])
            if node in sets:
                self.members += [*(code + _FIRST_CODE for code in sets[node]), float("nan")]
                self._ask(column, _MEMBER, 0.0, 1 - default_left, to_right, to_left)
            else:
                self._ask(column, _BELOW, tree["split_conditions"][node], default_left, to_left, to_right)

    def _ask(self, column: int, mode: int, split: float, missing: int, true: _End, false: _End) -> None:
        self.columns.append(column)
        self.modes.append(mode)
        self.splits.append(split)
        self.missing_true.append(missing)
        self.true_ends.append(true)
        self.false_ends.append(false)

    def attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tree_roots": self.roots,
            "nodes_featureids": self.columns,
            "nodes_modes": numpy_helper.from_array(np.array(self.modes, np.uint8)),
            "nodes_splits": numpy_helper.from_array(np.array(self.splits, np.float32)),
            "nodes_missing_value_tracks_true": self.missing_true,
            "nodes_truenodeids": [place for place, _ in self.true_ends],
            "nodes_trueleafs": [leaf for _, leaf in self.true_ends],
            "nodes_falsenodeids": [place for place, _ in self.false_ends],
            "nodes_falseleafs": [leaf for _, leaf in self.false_ends],
            "leaf_targetids": self.leaf_targets,
            "leaf_weights": numpy_helper.from_array(np.array(self.leaf_weights, np.float32)),
        }
        if self.members:
            found["membership_values"] = numpy_helper.from_array(np.array(self.members, np.float32))
        return found


def _category_sets(tree: Mapping[str, Any]) -> dict[int, list[int]]:
    """Returns for each node that splits by categories those that go right, as XGBoost stores them."""
    parts = (tree["categories_nodes"], tree["categories_segments"], tree["categories_sizes"])
    return {
        node: sorted(int(code) for code in tree["categories"][start : start + size])
        for node, start, size in zip(*parts, strict=True)
    }


def _base(
    given: np.ndarray[Any, np.dtype[np.float32]], task: Task, outputs: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the base score of every row as a margin; XGBoost writes that of a binary model as a probability."""
    if task == "binary":
        given = -np.log(np.float32(1.0) / given - np.float32(1.0))
    return np.ascontiguousarray(np.broadcast_to(given.astype(np.float32), (outputs,)))


def _graph(forest: _Forest, base: np.ndarray[Any, Any], shape: TableShape) -> onnx.ModelProto:
    graph = GraphBuilder("trees/")
    kinds = column_types(shape.numeric, shape.sizes)[shape.numeric :]
    shift = graph.constant(np.array([_FIRST_CODE if kind == "c" else 0 for kind in kinds], np.int64), "first")
    codes = graph.op("Cast", graph.op("Add", "cat", shift), to=onnx.TensorProto.FLOAT)
    row = graph.op("Concat", "num", codes, axis=1)
    sums = graph.op(
        "TreeEnsemble", row, domain="ai.onnx.ml", n_targets=shape.outputs, aggregate_function=_SUM,
        post_transform=_AS_IS, **forest.attributes(),
    )  # fmt: skip
    start = graph.constant(base.reshape(1, -1), "base")
    graph.nodes.append(helper.make_node("Add", [sums, start], ["logits"], name="trees/sum"))
    return graph.to_model(
        {
            "num": (onnx.TensorProto.FLOAT, ("batch", shape.numeric)),
            "cat": (onnx.TensorProto.INT64, ("batch", len(shape.sizes))),
        },
        {"logits": (onnx.TensorProto.FLOAT, ("batch", shape.outputs))},
        opsets={"ai.onnx.ml": ML_OPSET},
    )
