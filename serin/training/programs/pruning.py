"""Removes whole hidden units from a trained network, the weakest first: a smaller network, not one with zeros in it.

`python -m serin.training.programs.pruning FOLDER PARENT_PID`, started by the launcher after a training with
`training.prune`. It writes `pruned/start/` with the remaining weights; a separate run in `pruned/` then trains them
further.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from serin.formats.weights import read_weights, write_weights
from serin.machine.parent_death import die_with_parent
from serin.spec.model import ModelSpec
from serin.training.launch.job import read_job, start_folder, whole_folder


def main() -> None:
    folder = Path(sys.argv[1])
    die_with_parent(int(sys.argv[2]))
    job = read_job(folder)
    assert job.training.prune is not None
    trained = read_weights(folder / "result")
    model, state = prune(trained.model.model, trained.state, job.training.prune.share)
    record = trained.model.model_copy(update={"model": model}).model_dump(exclude={"weights_sha256"})
    with whole_folder(start_folder(folder)) as scratch:
        write_weights(scratch, state, record)


def prune(model: ModelSpec, state: Mapping[str, Tensor], share: float) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Returns `state` without `share` of the units of each hidden layer, and the model it now belongs to.

    A unit's importance is the norm of its incoming weights times that of its outgoing ones. Supports mlp and dcn; other
    parts beside the hidden layers are unchanged.
    """
    cut = {name: tensor.clone() for name, tensor in state.items()}
    weights = [name for name in state if name.startswith("layers.") and name.endswith(".weight")]
    layers = [name.removesuffix(".weight") for name in weights]
    layers.sort(key=lambda name: int(name.rpartition(".")[2]))
    hidden = []
    for position, layer in enumerate(layers):
        after = layers[position + 1] if position + 1 < len(layers) else "head"
        units = len(cut[f"{layer}.bias"])
        # Inputs of a dcn's head that come from its cross layers.
        beside = cut[f"{after}.weight"].shape[1] - units
        out = cut[f"{after}.weight"][:, beside:]
        weight = cut[f"{layer}.weight"].norm(dim=1) * out.norm(dim=0)
        keep = max(1, math.ceil(units * (1 - share)))
        kept = torch.sort(torch.topk(weight, keep).indices).values
        cut[f"{layer}.weight"] = cut[f"{layer}.weight"][kept]
        cut[f"{layer}.bias"] = cut[f"{layer}.bias"][kept]
        columns = torch.cat([torch.arange(beside), beside + kept])
        cut[f"{after}.weight"] = cut[f"{after}.weight"][:, columns]
        hidden.append(keep)
    return model.model_copy(update={"hidden": tuple(hidden)}), cut


if __name__ == "__main__":
    main()
