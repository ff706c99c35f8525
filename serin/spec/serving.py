"""The section `serving`: how a version is served by Triton."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from serin.spec.rate import RateText
from serin.spec.section import Duration, Section, Size


class ReplicaRange(Section):
    """How many replicas of a release an autoscaler may run. On Kubernetes alone."""

    min: int = Field(default=1, ge=1)
    """The replicas that always run."""
    max: int = Field(ge=1)
    """The most replicas, whatever the load."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is more than max={self.max}; exchange them")
        return self

    def __str__(self) -> str:
        return f"{{min: {self.min}, max: {self.max}}}"


def _form(value: Any) -> str:
    if isinstance(value, str) and not value.isdigit():
        return "<all>"
    return "<range>" if isinstance(value, dict | ReplicaRange) else "<number>"


Replicas = Annotated[
    Annotated[int, Field(ge=1), Tag("<number>")]
    | Annotated[Literal["all"], Tag("<all>")]
    | Annotated[ReplicaRange, Tag("<range>")],
    Discriminator(_form),
]


class ServingSpec(Section):
    """How a version is served by Triton."""

    max_batch_rows: int = Field(default=1024, ge=1)
    """The largest number of rows in one batch, and so in one request."""
    request_timeout: Duration = Field(default=5.0, gt=0)
    """How long one request may take before the client gets a timeout."""
    backend: Literal[
        "auto", "onnx_native", "onnx_python", "onnxruntime", "ensemble", "tensorrt_plan", "fil"
    ] = "auto"
    """What runs the model inside Triton (see docs/how-to/serve.md). `auto` takes the best that the server has."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where the model runs. `auto` takes a GPU for a version that was exported for one, if the machine has one."""
    accelerator: Literal["cuda", "tensorrt"] = "cuda"
    """What ONNX Runtime uses on a GPU."""
    gpus: int = Field(default=1, ge=1)
    """The number of GPUs that one release is spread over."""
    gpu_memory: Size | None = Field(default=None, ge=1)
    """The memory to reserve on each GPU. By default estimated from the bundle."""
    instances: int = Field(default=1, ge=1)
    """The number of model instances that score at the same time, on the CPU or on each GPU."""
    replicas: Replicas = "all"
    """The number of hosts that run a release, where several hosts share a store. `all`: every host with an agent. One
    machine runs one release. On Kubernetes: the number of pods, or a range such as `{min: 1, max: 8}`, in which an
    autoscaler follows the load (see docs/how-to/autoscale.md)."""
    threads: int | None = Field(default=None, ge=1)
    """The number of CPU threads for one run. By default what the export measured to be fastest."""
    queue_delay: Duration = Field(default=0.0, ge=0)
    """How long a request may wait to be batched with others, such as `500us`."""
    max_string: Size = Field(default=65_536, ge=1)
    """The longest string that a request may contain. A longer one is refused."""
    rate_limit: RateText | None = None
    """The inference requests that each gateway takes for this model, such as 100/s or 30/m; others are answered 429. By
    default there is no limit."""
    rate_burst: int | None = Field(default=None, ge=1)
    """The requests that may come at once within `rate_limit`. By default as many as it allows per unit."""

    @model_validator(mode="after")
    def _asks_for_a_gpu_where_it_needs_one(self) -> Self:
        wants = "backend=tensorrt_plan" if self.backend == "tensorrt_plan" else f"gpus={self.gpus}"
        if self.device == "cpu" and (self.backend == "tensorrt_plan" or self.gpus > 1):
            raise ValueError(f"device=cpu does not go with {wants}; leave one of them out")
        return self

    @model_validator(mode="after")
    def _has_a_limit_for_its_burst(self) -> Self:
        if self.rate_burst is not None and self.rate_limit is None:
            raise ValueError("rate_burst needs a rate_limit, such as 100/s")
        return self
