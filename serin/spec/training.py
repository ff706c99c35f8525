"""The section `training`: how the model is trained."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from serin.spec.section import CountOrAuto, Section

Strategy = Literal["ddp", "fsdp", "tensor"]
"""How several processes share one network."""
Execution = Literal["eager", "compiled", "cuda_graph"]
"""How a step runs: operation by operation, compiled by torch, or captured as one CUDA graph."""


class PruneSpec(Section):
    """A second, smaller network, cut from the first and trained further. Export offers it as the variant `pruned`."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """The share of units that is removed from each hidden layer."""
    epochs: int = Field(default=1, ge=1)
    """The number of epochs for which the smaller network is trained."""


class TrainingSpec(Section):
    """How the model is trained. `auto` is resolved when a run starts and recorded in its folder with the reason."""

    epochs: int = Field(default=5, ge=1)
    """The number of passes over the training split."""
    batch_rows: CountOrAuto = "auto"
    """Rows per optimizer step, over all processes together. `auto` measures the smallest batch that is about as fast as
    the fastest."""
    optimizer: Literal["adamw", "sgd", "adagrad"] = "adamw"
    """The optimizer."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """The peak learning rate. With `batch_rows: auto` it is meant for 1,024 rows and is scaled to the chosen batch."""
    schedule: Literal["cosine", "constant", "plateau"] = "cosine"
    """How the learning rate changes after the warm-up: half a cosine to 0, constant, or halved whenever the valid
    metric has not improved for two epochs."""
    weight_decay: float = Field(default=1e-5, ge=0)
    """The weight decay."""
    clip_norm: float | None = Field(default=None, gt=0)
    """The largest norm of all gradients together. By default gradients are not clipped."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """The number of parts in which the rows of a step go through the network, to save memory."""
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None
    """The weight of each class in the loss. `balanced` weighs by inverse frequency. By default all are equal."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after this many epochs without a better valid metric (xgboost: rounds, by default 50). By default all
    epochs are trained."""
    embedding_updates: Literal["auto", "dense", "sparse"] = "auto"
    """Which rows of the embedding table a step updates: all (`dense`), or only those that occur in its batch
    (`sparse`). `auto` decides by the size of the table."""
    seed: int = 0
    """The seed of all random numbers."""
    processes: CountOrAuto = "auto"
    """The number of training processes, one GPU each. `auto` takes all GPUs of the machine (trees: one), or one process
    on a CPU."""
    processes_per_gpu: int = Field(default=1, ge=1, exclude_if=lambda value: value == 1)
    """The number of processes that share one GPU. More than one exchange everything through the host (gloo, because
    NCCL refuses them) and are slower than one: this is for trying a training of several processes on one GPU."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """The precision of a step. `auto` measures and takes the most exact one that no other beats by 5%."""
    strategy: Literal["auto", Strategy] = "auto"
    """How processes share the network: `ddp` (replicas), `fsdp` (sharded weights) or `tensor` (sharded layers). `auto`
    decides by the memory that is needed."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for about a third more time."""
    execution: Literal["auto", Execution] = "auto"
    """How a step runs: `eager`, `compiled` by torch, or captured as a `cuda_graph`. `auto` takes a CUDA graph where a
    short measurement finds it faster, and never compiles."""
    checkpoint_every_steps: CountOrAuto = "auto"
    """Steps between checkpoints. `auto` saves every minute and at the end of each epoch."""
    prune: PruneSpec | None = None
    """Also train a smaller network (mlp, dcn). By default not."""

    def fine_tuning(self) -> TrainingSpec:
        """The further training of a pruned network."""
        assert self.prune is not None
        gentler = self.learning_rate * 0.5  # its weights are already good
        return self.model_copy(update={"epochs": self.prune.epochs, "learning_rate": gentler, "prune": None})

    @model_validator(mode="after")
    def _batch_divides_over_processes(self) -> Self:
        rows, ranks = self.batch_rows, self.processes
        if isinstance(rows, int) and isinstance(ranks, int) and rows % (ranks * self.gradient_accumulation):
            parts = ranks * self.gradient_accumulation
            raise ValueError(
                f"training.batch_rows={rows} does not divide over training.processes={ranks}"
                + (
                    f" with training.gradient_accumulation={self.gradient_accumulation}"
                    if self.gradient_accumulation > 1
                    else ""
                )
                + f"; nearest that does: {max(rows // parts, 1) * parts}"
            )
        return self

    @field_validator("class_weights")
    @classmethod
    def _weights_are_positive(cls, value: tuple[float, ...] | str | None) -> tuple[float, ...] | str | None:
        if isinstance(value, tuple) and (len(value) < 2 or min(value) <= 0):
            raise ValueError(f"{list(value)}: give one weight above 0 for each class, or balanced")
        return value
