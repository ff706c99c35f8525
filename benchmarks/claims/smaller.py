"""Claims about smaller networks: pruning, and int8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.claims.claim import Claim
from benchmarks.claims.flops import count_flops
from benchmarks.claims.trainings import SHAPE, Place, Settings, Table, Trained, train
from serin.export.convert.network import graph_network
from serin.export.convert.torch2onnx import torch2onnx
from serin.export.variants.build import Unavailable, build_variants
from serin.models.build import build_model
from serin.scoring.session import open_session
from serin.training.programs.pruning import prune
from serin.training.results.judge import judge_scores

DROP = 0.002  # of an AUC: above that a smaller network is not as good


def pruning(table: Table, place: Place) -> Claim:
    """Hidden units are removed after three epochs and the rest is trained for two more; beside it the whole network and
    one as small as the rest, each trained for five."""
    rows, batch, hidden = (
        (2**19, 8192, (512, 256)) if place == "cuda" else (table.train_rows, 2048, (128, 64))
    )
    wanted = Settings(hidden=hidden, rows=rows, batch_rows=batch, epochs=3, place=place)
    first, whole = train(table, wanted), train(table, replace(wanted, epochs=5))
    flops = _flops(whole)
    lines, cases, figures = [f"whole: {flops:,} FLOPs for a row, AUC {whole.auc:.4f}"], {}, {}
    for share in (0.5, 0.7):
        model, state = prune(first.model, first.state, share)
        start = replace(first, model=model, state=state)
        cut = train(table, replace(wanted, epochs=2, rate=wanted.rate / 2), start=start)
        fresh = train(table, replace(wanted, hidden=tuple(model.hidden), epochs=5))
        removed = 1 - _flops(cut) / flops
        name = f"{share:.0%} of the units"
        cases[name] = removed >= 0.7 and cut.auc >= whole.auc - DROP
        figures[f"pruned_{share:.1f}"], figures[f"pruned_{share:.1f}_auc"] = removed, cut.auc - whole.auc
        lines.append(
            f"{name} removed: {removed:.0%} fewer FLOPs, AUC {cut.auc:.4f} ({cut.auc - whole.auc:+.4f}); "
            f"as small from the beginning: {fresh.auc:.4f}"
        )
    says = f"pruning removes 70% of the FLOPs (AUC at most {DROP} lower)"
    return Claim(name="pruning", says=says, cases=cases, lines=lines, figures=figures)


def int8(table: Table, place: Place) -> Claim:
    """The exporter's variants in bytes, and their AUC on the valid rows, on the CPU."""
    rows, batch = (2**19, 8192) if place == "cuda" else (table.train_rows, 2048)
    cases, lines, figures = {}, [], {}
    kinds = {"wide": (1024, 1024) if place == "cuda" else (512, 512), "narrow": (64,)}
    for kind, hidden in kinds.items():
        trained = train(table, Settings(hidden=hidden, rows=rows, batch_rows=batch, epochs=2, place=place))
        network = graph_network(_graph(trained), "torch")
        calibration = _columns(table, 0, 2048)
        names = ("fp32", "int8", "int8_dynamic", "int8_embeddings")
        whole, whole_auc = 0, 0.0
        for variant in build_variants(names, network, calibration, "cpu"):
            if isinstance(variant, Unavailable):
                lines.append(f"{kind} network, {variant.name}: {variant.reason}")
                continue
            size, auc = len(variant.graph.SerializeToString()), _auc(table, variant.graph)
            if variant.name == "fp32":
                whole, whole_auc = size, auc
            share = size / whole
            lines.append(f"{kind} network {list(hidden)}, {variant.name}: {size:,} bytes, {share:.2f} of fp32, "
                         f"AUC {auc:.4f} ({auc - whole_auc:+.4f})")  # fmt: skip
            figures[f"{variant.name}_{kind}"] = share
            if variant.name in ("int8", "int8_dynamic"):
                cases[f"{kind} {variant.name}"] = share <= 0.27 and auc >= whole_auc - DROP
    return Claim(
        name="int8",
        says="int8 makes a model a quarter of its size",
        cases=cases,
        lines=lines,
        figures=figures,
    )


def _graph(trained: Trained) -> Any:
    network = build_model(trained.model, SHAPE)
    network.load_state_dict(dict(trained.state))
    return torch2onnx(network.to(torch.device("cpu")), SHAPE)


def _flops(trained: Trained) -> int:
    return count_flops(_graph(trained))


def _columns(table: Table, begin: int, end: int) -> dict[str, Any]:
    num, cat, _ = table.arrays(begin, end)
    return {"num": num, "cat": cat.astype(np.int64)}


def _auc(table: Table, graph: Any) -> float:
    begin, end = table.train_rows, min(table.rows, table.train_rows + 32_768)
    (logits,) = open_session(graph).run(["logits"], _columns(table, begin, end))
    scores = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    return judge_scores(table.arrays(begin, end)[2], scores.astype(np.float32), "binary", ())["auc"]
