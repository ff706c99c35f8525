"""A trained model for export, whatever trained it: its graph from `num` and `cat` to `logits`.

Only `read_network` knows the kinds of checkpoints; features, gate, variants and champion use `Network`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import compose, helper, numpy_helper

from serin.errors import ExportFailed
from serin.export.convert.trees2onnx import parse_trees, summed, trees2onnx
from serin.formats.dataset import DatasetDescription
from serin.formats.external_data import check_graph
from serin.formats.gate import NETWORK_TERMS, ScoreScale
from serin.formats.schema import Task
from serin.formats.trained import WEIGHTS, read_blend, read_record, read_trained
from serin.formats.wire import Array
from serin.models.shape import TableShape, shape_of, shape_of_record
from serin.models.trees import Margins, read_booster, tree_margins
from serin.scoring.session import open_session
from serin.store.waits import importing

_PRUNED = "pruned"  # beside the weights it was cut from

_INPUTS = ("num", "cat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A trained model as a graph with a reference.

    `graph`: num float32[batch, k], cat int64[batch, m] -> logits float32[batch, outputs] (both inputs are declared,
    even with no columns). A sigmoid or softmax turns logits into probabilities; a regression's value is final.
    `reference`: the same as the trainer itself computes it. `made_by` is named in messages and reports. `terms`,
    `base`, `size`: how a regression's score is summed, for ScoreScale. `smaller`: other graphs of the same form that
    training wrote beside the first, by the name of their variant ("pruned").
    """

    graph: onnx.ModelProto
    reference: Margins
    made_by: str
    smaller: Mapping[str, onnx.ModelProto] = field(default_factory=dict)
    terms: int = NETWORK_TERMS
    base: float | Array = 0.0
    size: float | Array = 0.0

    def scale(self, scores: Array) -> ScoreScale:
        """Returns what differences from these scores of a regression are measured in."""
        return ScoreScale.of(scores, terms=self.terms, base=self.base, size=self.size)


def read_network(folder: Path, data: DatasetDescription, *, tolerance: float) -> Network:
    """Reads the model of a training's result folder and checks that it was trained on a table of this form."""
    shape = _same_table(folder, data)
    match read_record(folder).file:
        case "trees.ubj":
            return _tree_network(folder, shape, data.task)
        case "model.onnx":
            record, graph = read_trained(folder)
            return graph_network(onnx.load_model_from_string(graph), made_by=f"model.{record.model.kind}")
        case "weights.safetensors":
            return _torch_network(folder, shape, tolerance)
        case "blend.json":
            return _blended_network(folder, data, tolerance)


def graph_network(graph: onnx.ModelProto, made_by: str) -> Network:
    """Returns a model that consists only of its graph, which is also its reference."""
    session = open_session(graph)

    def reference(num: Array, cat: Array) -> Array:
        (logits,) = session.run(["logits"], {"num": num, "cat": cat})
        return np.asarray(logits)

    return Network(graph=graph, reference=reference, made_by=made_by)


def _torch_network(folder: Path, shape: TableShape, tolerance: float) -> Network:
    with importing("imports of torch for export"):  # not for trees and graphs
        from serin.export.convert.torch2onnx import torch2onnx
        from serin.models.build import load_model, network_margins

    module = load_model(folder)
    graph = torch2onnx(module, shape, tolerance=tolerance, weights=folder / WEIGHTS)
    smaller, pruned = {}, folder / _PRUNED
    if pruned.is_dir():
        cut = load_model(pruned)
        smaller[_PRUNED] = torch2onnx(cut, shape, tolerance=tolerance, weights=pruned / WEIGHTS)
    base, size = (module.get_buffer(one).numpy() if shape.units else 0.0 for one in ("shift", "scale"))
    return Network(
        graph=graph, reference=network_margins(module), made_by="torch", smaller=smaller, base=base, size=size
    )


def _tree_network(folder: Path, shape: TableShape, task: Task) -> Network:
    document = parse_trees(read_booster(read_trained(folder)[1]))
    graph, (terms, base) = trees2onnx(document, shape, task), summed(document)
    return Network(graph=graph, reference=tree_margins(folder), made_by="XGBoost", terms=terms, base=base)


def _blended_network(folder: Path, data: DatasetDescription, tolerance: float) -> Network:
    """Returns the weighted sum of the members' logits, as one graph."""
    members = [
        (read_network(place, data, tolerance=tolerance), weight) for place, weight in read_blend(folder)
    ]

    def reference(num: Array, cat: Array) -> Array:
        total = sum(weight * member.reference(num, cat).astype(np.float64) for member, weight in members)
        return np.asarray(total, np.float32)

    graph = blend_graphs([(member.graph, weight) for member, weight in members])
    made_by = " and ".join(dict.fromkeys(member.made_by for member, _ in members))
    return Network(
        graph=graph,
        reference=reference,
        made_by=made_by,
        terms=sum(member.terms for member, _ in members),
        base=sum(weight * member.base for member, weight in members),
        size=sum(weight * member.size for member, weight in members),
    )


def _same_table(folder: Path, data: DatasetDescription) -> TableShape:
    """Returns the dataset's shape after checking that the model was trained on such a table and, where it names its
    dataset, on this one."""
    record, shape, state = read_record(folder), shape_of(data), folder / "state.json"
    trained_on = json.loads(state.read_text(encoding="utf-8")).get("dataset") if state.is_file() else None
    problem = ""
    if trained_on not in (None, data.digest):
        problem = f"it was trained on dataset {trained_on[:12]}, not on {data.digest[:12]}"
    elif (record.shape and shape_of_record(record), record.task) != (shape, data.task):
        table = f"the dataset is {data.task} with {shape}"
        problem = f"it was trained for {record.task} on {record.shape}, but {table}"
    if problem:
        reason = f"{problem}; use the checkpoint and the dataset of the same run"
        raise ExportFailed(what=f"the model in {folder}", reason=reason)
    return shape


def blend_graphs(members: Sequence[tuple[onnx.ModelProto, float]]) -> onnx.ModelProto:
    """Returns num, cat -> logits. Every member must have that form."""
    parts = [compose.add_prefix(model, f"member{number}/") for number, (model, _) in enumerate(members)]
    first = members[0][0]
    weights = [np.asarray(weight, np.float32) for _, weight in members]
    nodes: list[onnx.NodeProto] = []
    initializers: list[onnx.TensorProto] = []
    weighted: list[str] = []
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        prefix = f"member{number}/"
        names = {f"{prefix}{name}": name for name in _INPUTS}
        for node in part.graph.node:
            for position, name in enumerate(node.input):
                node.input[position] = names.get(name, name)
        nodes += part.graph.node
        initializers += [*part.graph.initializer, numpy_helper.from_array(weight, f"blend/weight{number}")]
        weighted.append(f"blend/logits{number}")
        nodes.append(
            helper.make_node(
                "Mul",
                [f"{prefix}logits", f"blend/weight{number}"],
                [weighted[-1]],
                name=f"blend/weigh{number}",
            )
        )
    nodes.append(helper.make_node("Sum", weighted, ["logits"], name="blend/sum"))
    graph = helper.make_graph(nodes, "blend", [*first.graph.input], [*first.graph.output], initializers)
    model = helper.make_model(
        graph,
        opset_imports=_opsets(parts),
        functions=[function for part in parts for function in part.functions],
        ir_version=max(part.ir_version for part in parts),
    )
    try:
        check_graph(model, full=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportFailed(what="the blend", reason=f"its models do not fit together: {error}") from error
    return model


def _opsets(parts: Sequence[onnx.ModelProto]) -> list[onnx.OperatorSetIdProto]:
    """Returns the newest version of each domain. Trees and networks are written for the same main opset."""
    newest: dict[str, int] = {}
    for part in parts:
        for opset in part.opset_import:
            newest[opset.domain] = max(opset.version, newest.get(opset.domain, 0))
    return [helper.make_opsetid(domain, version) for domain, version in newest.items()]
