"""Examines how GPUs are connected (PCIe, NVLink, NUMA, pinned memory) and reports poor links.

Pure functions parse the output of nvidia-smi; `examine_links` calls it. Bandwidth is measured in a separate process,
because that needs torch.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from serin.machine import environment
from serin.stack.doctor.finding import Finding

QUERY = (
    "index,uuid,name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "pcie.link.width.max,persistence_mode,mig.mode.current,ecc.errors.uncorrected.volatile.total,memory.used,memory.total"
)
_ASKED_S = 20
_MEASURED_S = 90
_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one lane, one direction
_GOOD_SHARE = 0.6  # of the link's rate, which a copy from pinned memory should reach
_ANSI = re.compile(r"\x1b\[[0-9;]*m|\[[0-9]+m")
_LINK = re.compile(r"Link (\d+): (?:([0-9.]+) GB/s|<inactive>)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A line of `nvidia-smi --query-gpu`; None for values that the driver does not report."""

    index: int
    uuid: str
    name: str
    driver: str
    generation: int | None  # of PCIe, now: an idle card may use a lower one
    max_generation: int | None
    width: int | None
    max_width: int | None
    persistence: bool | None
    mig: bool
    broken_words: int | None  # uncorrected memory errors since the driver was loaded
    used_mib: int | None
    total_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`nvidia-smi topo -m`: the path between each two GPUs (NV18, PIX, SYS, ...), and the CPUs near each."""

    paths: dict[tuple[int, int], str]
    near_cpus: dict[int, frozenset[int]]
    numa_node: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    pinned_gb_s: float
    pageable_gb_s: float


def read_gpus(text: str) -> list[Gpu]:
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(QUERY.split(",")):
            index, uuid, name, driver, *rest = (cell.strip() for cell in row)
            found.append(
                Gpu(
                    index=int(index),
                    uuid=uuid,
                    name=name,
                    driver=driver,
                    generation=_whole(rest[0]),
                    max_generation=_whole(rest[1]),
                    width=_whole(rest[2]),
                    max_width=_whole(rest[3]),
                    persistence={"Enabled": True, "Disabled": False}.get(rest[4]),
                    mig=rest[5] == "Enabled",
                    broken_words=_whole(rest[6]),
                    used_mib=_whole(rest[7]),
                    total_mib=_whole(rest[8]),
                )
            )
    return found


def read_topology(text: str) -> Topology:
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    header = next((line for line in lines if "CPU Affinity" in line), "")
    columns = [cell.strip() for cell in header.split("\t") if cell.strip()]
    paths: dict[tuple[int, int], str] = {}
    near: dict[int, frozenset[int]] = {}
    node: dict[int, str] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if not re.fullmatch(r"GPU\d+", cells[0]):
            continue
        me = int(cells[0].removeprefix("GPU"))
        values = dict(zip(columns, (cell for cell in cells[1:] if cell), strict=False))
        for other, path in values.items():
            if re.fullmatch(r"GPU\d+", other) and path != "X":
                paths[me, int(other.removeprefix("GPU"))] = path
        near[me] = _cpus(values.get("CPU Affinity", ""))
        node[me] = values.get("NUMA Affinity", "N/A")
    return Topology(paths=paths, near_cpus=near, numa_node=node)


def read_nvlinks(text: str) -> dict[int, list[float | None]]:
    """Returns by GPU the GB/s of each link, None for one that is down."""
    found: dict[int, list[float | None]] = {}
    now: list[float | None] = []
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            now = found.setdefault(int(match[1]), [])
        elif match := _LINK.search(line):
            now.append(float(match[2]) if match[2] else None)
    return found


def judge_links(
    gpus: Collection[Gpu],
    topology: Topology,
    nvlinks: Mapping[int, list[float | None]],
    bandwidth: Bandwidth | None,
    our_cpus: Collection[int],
) -> list[Finding]:
    """Judges the links: what is there, and what performs badly."""
    return [
        *(_card(gpu) for gpu in gpus),
        *(_pcie(gpu, bandwidth) for gpu in gpus),
        _nvlink(gpus, topology, nvlinks),
        _numa(gpus, topology, our_cpus),
    ]


def examine_links() -> list[Finding]:
    """Examines this machine's GPUs; one note where there is no driver."""
    smi = shutil.which("nvidia-smi", path=environment.search_path())
    if smi is None:
        unseen = "PCIe, NVLink, NUMA and pinned bandwidth cannot be seen without NVIDIA's driver"
        return [Finding(what="GPU links", verdict="note", found="no nvidia-smi", advice=unseen)]
    gpus = read_gpus(_ask(smi, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"))
    if not gpus:
        advice = "nvidia-smi shows no GPU: is the driver loaded, and is the device visible in this container?"
        return [Finding(what="GPU links", verdict="missing", found="no GPU answers", advice=advice)]
    measured = measure_bandwidth()
    topology, nvlinks = read_topology(_ask(smi, "topo", "-m")), read_nvlinks(_ask(smi, "nvlink", "--status"))
    bandwidth = measured if isinstance(measured, Bandwidth) else None
    found = judge_links(gpus, topology, nvlinks, bandwidth, os.sched_getaffinity(0))
    if isinstance(measured, str):
        advice = "install a torch that is built for CUDA: see pytorch.org"
        found.append(Finding(what="torch on the GPU", verdict="missing", found=measured, advice=advice))
    return found


def measure_bandwidth() -> Bandwidth | str:
    """Measures the bandwidth from host memory to the first GPU, or says why it cannot be measured."""
    command = [sys.executable, "-m", "serin.stack.doctor.pinned_bandwidth"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MEASURED_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {_MEASURED_S} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["exited without output"])[-1]
    return Bandwidth(**json.loads(done.stdout))


def _card(gpu: Gpu) -> Finding:
    used = (
        ""
        if gpu.used_mib is None or not gpu.total_mib
        else f", {gpu.used_mib / gpu.total_mib:.0%} of memory used"
    )
    found = f"{gpu.name}, driver {gpu.driver}{used}"
    what = f"GPU {gpu.index}"
    if gpu.broken_words:
        advice = f"{gpu.broken_words} memory errors could not be corrected: results may be wrong; reset or replace it"
        return Finding(what=what, verdict="missing", found=found, advice=advice)
    if gpu.mig:
        advice = "it is split into MIG instances: a lease takes the whole card, so give each instance its own container"
        return Finding(what=what, verdict="note", found=found, advice=advice)
    if gpu.persistence is False:
        advice = "persistence mode is off: first uses take seconds longer (run nvidia-smi -pm 1 as root)"
        return Finding(what=what, verdict="note", found=found, advice=advice)
    return Finding(what=what, verdict="ok", found=found)


def _pcie(gpu: Gpu, bandwidth: Bandwidth | None) -> Finding:
    what = f"GPU {gpu.index} PCIe"
    if gpu.width is None or gpu.max_generation is None:
        return Finding(
            what=what,
            verdict="note",
            found="not reported by the driver",
            advice="a virtual machine may hide it",
        )
    generation = gpu.max_generation  # an idle card uses a lower one until the first copy
    rate = _LANE_GB_S.get(generation, _LANE_GB_S[6]) * gpu.width
    found = f"generation {generation}, {gpu.width} lanes: {rate:.0f} GB/s each way"
    if bandwidth is not None and gpu.index == 0:
        found += f"; measured {bandwidth.pinned_gb_s:.1f} from pinned memory, {bandwidth.pageable_gb_s:.1f} from other"
    if gpu.max_width is not None and gpu.width < gpu.max_width:
        advice = f"only {gpu.width} of {gpu.max_width} lanes are up: check the slot and the card's seat in it"
        return Finding(what=what, verdict="note", found=found, advice=advice)
    if bandwidth is not None and gpu.index == 0 and bandwidth.pinned_gb_s < _GOOD_SHARE * rate:
        share = bandwidth.pinned_gb_s / rate
        advice = f"a copy reaches {share:.0%} of the link: is the process on the card's NUMA node, is the link shared?"
        return Finding(what=what, verdict="note", found=found, advice=advice)
    return Finding(what=what, verdict="ok", found=found)


def _nvlink(gpus: Collection[Gpu], topology: Topology, nvlinks: Mapping[int, list[float | None]]) -> Finding:
    up = {index: [rate for rate in links if rate] for index, links in nvlinks.items()}
    if len(gpus) < 2:
        found = f"{len(up.get(0, []))} links up; a single GPU has no peer"
        return Finding(what="NVLink", verdict="ok", found=found)
    total = {index: sum(rates) for index, rates in up.items() if rates}
    slow = sorted({path for path in topology.paths.values() if not path.startswith("NV")})
    found = ", ".join(f"GPU {index}: {rate:.0f} GB/s" for index, rate in total.items()) or "none"
    crossing = [
        pair for pair, path in topology.paths.items() if path in ("SYS", "NODE") and pair[0] < pair[1]
    ]
    if crossing:
        pairs = ", ".join(f"{a} and {b}" for a, b in crossing[:4])
        advice = f"GPUs {pairs} communicate through the CPU, which slows a training down; lease linked ones"
        return Finding(what="NVLink", verdict="note", found=found, advice=advice)
    widths = {path for path in topology.paths.values() if path.startswith("NV")}
    if len(widths) > 1:
        advice = (
            f"pairs differ ({', '.join(sorted(widths))}): some links are down, and the slowest one limits all"
        )
        return Finding(what="NVLink", verdict="note", found=found, advice=advice)
    if slow:
        found += f"; paths by PCIe: {', '.join(slow)}"
    return Finding(what="NVLink", verdict="ok", found=found)


def _numa(gpus: Collection[Gpu], topology: Topology, our_cpus: Collection[int]) -> Finding:
    nodes = {gpu.index: topology.numa_node.get(gpu.index, "N/A") for gpu in gpus}
    found = ", ".join(f"GPU {index}: node {node}" for index, node in nodes.items())
    far = [
        index
        for index in nodes
        if topology.near_cpus.get(index) and not topology.near_cpus[index] & frozenset(our_cpus)
    ]
    if far:
        names = ", ".join(str(index) for index in far)
        node = nodes[far[0]]
        advice = f"this process may not run near GPU {names}: start it with numactl --cpunodebind={node}"
        return Finding(what="NUMA", verdict="note", found=found, advice=advice)
    return Finding(what="NUMA", verdict="ok", found=found)


def _ask(*command: str) -> str:
    """Returns the program's output; empty where it does not support the query."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASKED_S)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _whole(cell: str) -> int | None:
    return int(cell) if cell.isdigit() else None


def _cpus(text: str) -> frozenset[int]:
    """Parses a CPU list: '0-3,8' -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in text.split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()):
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
