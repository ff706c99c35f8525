"""Reserves GPU memory for a release before it is loaded. A release that does not fit is refused, not tried.

The reservation is stored in the release's record (`release.json`), so it lasts as long as the release.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from serin.errors import GpuMemoryShort
from serin.formats.bundle import CORE, MODEL, PLAN, REPOSITORY, TREES
from serin.formats.external_data import graph_bytes
from serin.machine import environment
from serin.machine.hardware import Device, Nvml
from serin.machine.leases import holders, offered_bytes
from serin.serving.triton.backends import Choice
from serin.serving.triton.release_record import reserved_bytes
from serin.spec.serving import ServingSpec

MB = 1 << 20
CONTEXT_BYTES = 700 * MB  # CUDA's context and the handles of its libraries, for each process
_LEAST_BYTES = 256 * MB  # for weights, activations and temporary memory of libraries
_SPARE = 2.0  # an arena always has some fragmentation
_WORKSPACE_BYTES = 1024 * MB  # TensorRT
_GRAPHS_BYTES = 128 * MB  # CUDA graphs and inputs and outputs in fixed places, outside of ONNX Runtime's part


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The memory that a release needs on each GPU. `arena_bytes`: the part that ONNX Runtime may use per instance."""

    total_bytes: int
    arena_bytes: int


def estimate_need(folder: Path, choice: Choice, serving: ServingSpec) -> Need:
    """Estimates the memory of the bundle in `folder` at its largest batch, or takes `serving.gpu_memory` if set."""
    file = _accelerated(folder, choice)
    weights, activations = file.stat().st_size, 0
    if file.suffix == ".onnx":
        graph = onnx.load_model(file, load_external_data=False)
        weights, activations = graph_bytes(graph), bytes_per_row(graph) * serving.max_batch_rows
    arena = max(_LEAST_BYTES, round(_SPARE * (weights + activations)))
    if choice.backend == "tensorrt_plan" or serving.accelerator == "tensorrt":
        arena += _WORKSPACE_BYTES
    # The server itself is the first. In the Python backend, instances are processes with their own CUDA contexts.
    in_python = choice.backend == "onnx_python" or choice.core == "python"
    processes = 1 + (serving.instances if in_python else 0)
    beside = _GRAPHS_BYTES if choice.backend == "onnx_native" else 0
    total = processes * CONTEXT_BYTES + serving.instances * (arena + beside)
    if serving.gpu_memory is not None:
        total = serving.gpu_memory
        arena = max(64 * MB, (total - processes * CONTEXT_BYTES) // serving.instances - beside)
    return Need(total_bytes=total, arena_bytes=arena)


def repository_need(folder: Path, serving: ServingSpec) -> Need:
    """Estimates the memory of a team's own repository, which cannot be inspected: twice the size of its files."""
    sizes = sum(path.stat().st_size for path in (folder / REPOSITORY).rglob("*") if path.is_file())
    arena = max(_LEAST_BYTES, round(_SPARE * sizes))
    total = CONTEXT_BYTES + arena if serving.gpu_memory is None else serving.gpu_memory
    return Need(total_bytes=total, arena_bytes=arena)


def bytes_per_row(model: onnx.ModelProto) -> int:
    """Sums all tensors between a graph's inputs and its answer, as if none were freed before the end."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    total = 0
    for info in (*inferred.input, *inferred.value_info, *inferred.output):
        tensor = info.type.tensor_type
        sizes = [size.dim_value for size in tensor.shape.dim if size.dim_value > 0]
        by_batch = any(not size.dim_value for size in tensor.shape.dim)
        if by_batch and tensor.elem_type != onnx.TensorProto.STRING:
            total += math.prod(sizes) * onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A device and its users: trainings and stages by their leases, releases by their records.

    `free`: as the driver reports it now, None if unknown.
    """

    device: Device
    leased_bytes: int = 0
    leased_by: tuple[str, ...] = ()
    releases: Mapping[str, int] = field(default_factory=dict)
    free: int | None = None

    @property
    def bytes(self) -> int:
        left = self.device.memory_bytes - self.leased_bytes - sum(self.releases.values())
        return max(0, left if self.free is None else min(left, self.free))

    def __str__(self) -> str:
        takers = [f"{name} has {size // MB:,}" for name, size in sorted(self.releases.items())]
        takers += [f"leased by {holder}" for holder in self.leased_by]
        who = f", {', '.join(takers)}" if takers else ""
        return f"{self.device.id}: {self.bytes // MB:,} of {self.device.memory_bytes // MB:,} MB free{who}"


def look_around(devices: Sequence[Device], *, releases: Path, but: str) -> list[Room]:
    """Returns the room on each device for a release called `but`, whose own reservation does not count.

    `releases`: the folder of all of them, in the home that also has the leases. An exclusive lease may use the whole
    device except what SERIN_SERVING_MEMORY keeps for served models.
    """
    reserved = reserved_bytes(releases)
    held = holders(releases.parent)
    nvml = None if environment.path("SERIN_INVENTORY") else Nvml.open()
    rooms = []
    for device in devices:
        here = [holder for holder in held if holder.device == device.id]
        alone = any(holder.kind == "exclusive" for holder in here)
        rooms.append(
            Room(
                device=device,
                leased_bytes=offered_bytes(device) if alone else sum(holder.memory_bytes for holder in here),
                leased_by=tuple(str(holder) for holder in here),
                releases={name: size for name, size in reserved.get(device.id, {}).items() if name != but},
                free=nvml.free_bytes(device.id) if nvml else None,
            )
        )
    return rooms


def pick_devices(release: str, need: Need, count: int, rooms: Sequence[Room]) -> tuple[Device, ...]:
    """Returns the `count` devices with the most room, each with enough; GpuMemoryShort names the users of the rest."""
    fitting = sorted((room for room in rooms if room.bytes >= need.total_bytes), key=lambda room: -room.bytes)
    if len(fitting) < count:
        raise GpuMemoryShort(
            release=release, wanted_mb=math.ceil(need.total_bytes / MB), room=[str(room) for room in rooms]
        )
    return tuple(room.device for room in fitting[:count])


def _accelerated(folder: Path, choice: Choice) -> Path:
    """Returns the file that is loaded on the GPU."""
    if choice.backend == "tensorrt_plan":
        return folder / PLAN
    if choice.backend == "fil":
        return folder / TREES
    if choice.backend == "onnxruntime" or not (folder / CORE).is_file():
        return folder / MODEL
    return folder / CORE
