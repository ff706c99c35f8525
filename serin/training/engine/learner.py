"""Combines what learns on one rank: the parallelized network, its optimizer, the step, and the state to save."""

from __future__ import annotations

from torch import nn

from serin.spec.training import TrainingSpec
from serin.training.engine.activation_checkpoint import recompute_parts
from serin.training.engine.optimizer import Optimizer
from serin.training.engine.precision import Precision, candidates
from serin.training.engine.state import RunState
from serin.training.engine.step import Step
from serin.training.launch.job import ResolvedSettings
from serin.training.parallel.losses import Loss
from serin.training.parallel.parallelize import Parallelized
from serin.training.parallel.pipeline import Pipeline
from serin.training.parallel.ranks import Ranks


class Learner:
    """A learner, made from a network on the host; afterwards it is on the ranks' devices, whole or in parts."""

    def __init__(
        self, network: nn.Module, training: TrainingSpec, choices: ResolvedSettings, loss: Loss, world: Ranks
    ) -> None:
        self.network, self.world, self.wanted_execution = network, world, training.execution
        if training.gradient_checkpointing:
            recompute_parts(network)
        self.updates = Optimizer(network, training, world, by_row=choices.by_row, strategy=choices.strategy)
        piped = choices.strategy == "pipeline" and world.size > 1
        self.spread = Pipeline(network, world) if piped else Parallelized(network, choices.strategy, world)
        self.updates.begin(network)
        self.state = RunState(self.spread, self.updates, seed=training.seed)
        precision = _first(world) if choices.precision == "auto" else choices.precision
        self.step = Step(
            self.spread, self.updates, loss, precision=precision, world=world, parts=choices.parts
        )

    @property
    def may_capture(self) -> bool:
        return self.wanted_execution in ("auto", "cuda_graph") and not self.why_not_captured

    @property
    def why_not_captured(self) -> str:
        """Returns a reason why a step cannot be captured that is known without trying; '' if none."""
        if self.world.device.type != "cuda":
            return "only a GPU can capture a step"
        if self.world.size > 1 and self.spread.strategy != "ddp":
            return f"a step of {self.spread.strategy} communicates with other processes between its layers"
        if self.world.size > 1 and self.world.device_ranks > 1:
            return "processes that share a GPU exchange gradients through the host"
        return ""


def _first(world: Ranks) -> Precision:
    """Returns the precision until it is measured: TF32 where available, as most runs will use it in the end."""
    return "tf32" if "tf32" in candidates(world.device) else "fp32"
