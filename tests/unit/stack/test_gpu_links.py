"""What nvidia-smi prints, read and judged. The texts have the form of real ones (driver 580)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serin.stack.doctor.finding import Finding
from serin.stack.doctor.gpu_links import (
    Bandwidth,
    examine_links,
    judge_links,
    read_gpus,
    read_nvlinks,
    read_topology,
)

GPUS = """\
0, GPU-6f3d2c1a-0000-1111-2222-333344445555, NVIDIA H200, 580.159.03, 1, 5, 16, 16, Enabled, Disabled, 0, 4, 143771
1, GPU-6f3d2c1a-0000-1111-2222-333344446666, NVIDIA H200, 580.159.03, 5, 5, 16, 16, Enabled, Disabled, 0, 71000, 143771
"""
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-3,8-9\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t4-7\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)
NVLINKS = """\
GPU 0: NVIDIA H200 (UUID: GPU-6f3d2c1a-0000-1111-2222-333344445555)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H200 (UUID: GPU-6f3d2c1a-0000-1111-2222-333344446666)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""
FAST = Bandwidth(pinned_gb_s=55.0, pageable_gb_s=11.0)


# Recorded on a virtual machine with one H200 (driver 580.159.04); `nvidia-smi nvlink --status` printed nothing there.
ALONE = (
    "0, GPU-221b1ecd-053e-2e3e-f24a-3810fa0b6e16, NVIDIA H200, 580.159.04, 5, 5, 16, 16, Enabled, Disabled, 0, 0, "
    "143771\n"
)
ALONE_TOPOLOGY = (
    "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n"
)


def judged(**changes: object) -> dict[str, Finding]:
    given = {
        "gpus": read_gpus(GPUS),
        "topology": read_topology(TOPOLOGY),
        "nvlinks": read_nvlinks(NVLINKS),
        "bandwidth": FAST,
        "our_cpus": range(10),
    } | changes
    return {finding.what: finding for finding in judge_links(**given)}  # type: ignore[arg-type]


def test_the_cards_are_read() -> None:
    first, second = read_gpus(GPUS)
    assert (first.name, first.driver, first.generation, first.max_generation) == (
        "NVIDIA H200",
        "580.159.03",
        1,
        5,
    )
    assert (second.width, second.persistence, second.mig, second.broken_words) == (16, True, False, 0)
    assert (
        read_gpus("0, GPU-1, Tesla, 1.0, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], 1, 2\n")[0].width
        is None
    )


def test_the_topology_is_read_with_its_underlined_header_and_without_network_cards() -> None:
    found = read_topology(TOPOLOGY)
    assert found.paths == {(0, 1): "NV18", (1, 0): "NV18"}
    assert found.near_cpus == {0: frozenset({0, 1, 2, 3, 8, 9}), 1: frozenset({4, 5, 6, 7})}
    assert found.numa_node == {0: "0", 1: "1"}


def test_the_links_are_read() -> None:
    assert read_nvlinks(NVLINKS) == {0: [26.562, 26.562], 1: [26.562, None]}


def test_a_good_machine_is_good_also_when_an_idle_card_has_fallen_back() -> None:
    assert {finding.verdict for finding in judged().values()} == {"ok"}
    assert judged()["GPU 0 PCIe"].found.startswith("generation 5, 16 lanes: 63 GB/s each way; measured 55.0")


@pytest.mark.parametrize(
    ("changes", "what", "advice"),
    [
        (
            {"bandwidth": Bandwidth(pinned_gb_s=12.0, pageable_gb_s=9.0)},
            "GPU 0 PCIe",
            "reaches 19% of the link",
        ),
        ({"our_cpus": [4, 5]}, "NUMA", "--cpunodebind=0"),
        (
            {"topology": read_topology(TOPOLOGY.replace("NV18", "SYS"))},
            "NVLink",
            "0 and 1 communicate through the CPU",
        ),
        ({"gpus": [replace(gpu, width=8) for gpu in read_gpus(GPUS)]}, "GPU 1 PCIe", "only 8 of 16 lanes"),
        ({"gpus": [replace(gpu, persistence=False) for gpu in read_gpus(GPUS)]}, "GPU 0", "persistence mode"),
        ({"gpus": [replace(gpu, mig=True) for gpu in read_gpus(GPUS)]}, "GPU 0", "MIG"),
    ],
)
def test_what_fits_badly_is_noted_with_what_to_do(changes: dict[str, object], what: str, advice: str) -> None:
    finding = judged(**changes)[what]
    assert finding.verdict == "note"
    assert advice in finding.advice


def test_links_that_are_down_between_some_pairs_are_noted() -> None:
    three = (
        "\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tNV18\tNV16\t0-9\t0\t\tN/A\n"
        "GPU1\tNV18\t X \tNV16\t0-9\t0\t\tN/A\n"
        "GPU2\tNV16\tNV16\t X \t0-9\t0\t\tN/A\n"
    )
    finding = judged(topology=read_topology(three))["NVLink"]
    assert (finding.verdict, "NV16, NV18" in finding.advice) == ("note", True)


def test_a_card_that_is_alone_needs_no_links() -> None:
    found = judged(gpus=read_gpus(ALONE), topology=read_topology(ALONE_TOPOLOGY), nvlinks=read_nvlinks(""))
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert list(found) == ["GPU 0", "GPU 0 PCIe", "NVLink", "NUMA"]
    assert found["NUMA"].found == "GPU 0: node 0"


def test_memory_that_is_broken_is_missing() -> None:
    broken = [replace(gpu, broken_words=2) for gpu in read_gpus(GPUS)]
    assert judged(gpus=broken)["GPU 0"].verdict == "missing"


def test_a_machine_without_a_driver_says_what_it_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (finding,) = examine_links()
    assert finding.verdict == "note"
    assert "cannot be seen" in finding.advice
