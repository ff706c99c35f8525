"""What nvidia-smi prints about cards and their links, judged. The texts have the form of real ones (driver 580)."""

import pytest

from serin.stack.doctor import Finding, examine_gpus, judge_cards, judge_topology

CARDS = """\
0, NVIDIA H200, 580.159.03, 4, 143771, Enabled, Disabled, 0
1, NVIDIA H200, 580.159.03, 71000, 143771, Enabled, Disabled, 0
"""
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-3,8-9\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t4-7\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)
THREE = (
    "\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV18\tNV16\t0-9\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV16\t0-9\t0\t\tN/A\n"
    "GPU2\tNV16\tNV16\t X \t0-9\t0\t\tN/A\n"
)
# Recorded on a virtual machine with one H200 (driver 580.159.04).
ALONE = (
    "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n"
)


def judged(
    *, cards: str = CARDS, topology: str = TOPOLOGY, our_cpus: range = range(10)
) -> dict[str, Finding]:
    findings = [*judge_cards(cards), *judge_topology(topology, our_cpus)]
    return {finding.what: finding for finding in findings}


def test_a_good_machine_is_good() -> None:
    found = judged()
    assert {name: (each.verdict, each.found) for name, each in found.items()} == {
        "GPU 0": ("ok", "NVIDIA H200, driver 580.159.03, 0% of memory used"),
        "GPU 1": ("ok", "NVIDIA H200, driver 580.159.03, 49% of memory used"),
        "NVLink": ("ok", "between GPUs: NV18"),
        "NUMA": ("ok", "GPU 0: node 0, GPU 1: node 1"),
    }


@pytest.mark.parametrize(
    ("what", "advice", "changes"),
    [
        ("NUMA", "--cpunodebind=0", {"our_cpus": range(4, 6)}),
        ("NVLink", "0 and 1 communicate through the CPU", {"topology": TOPOLOGY.replace("NV18", "SYS")}),
        ("NVLink", "NV16, NV18", {"topology": THREE}),
        ("GPU 0", "persistence mode", {"cards": CARDS.replace("Enabled", "Disabled")}),
        ("GPU 1", "MIG", {"cards": CARDS.replace("Disabled, 0", "Enabled, 0")}),
    ],
)
def test_what_fits_badly_is_noted_with_what_to_do(what: str, advice: str, changes: dict[str, object]) -> None:
    finding = judged(**changes)[what]  # type: ignore[arg-type]
    assert finding.verdict == "note"
    assert advice in finding.advice


def test_a_card_that_is_alone_needs_no_links() -> None:
    found = judged(cards=CARDS.splitlines()[0], topology=ALONE)
    assert [(name, each.verdict) for name, each in found.items()] == [
        ("GPU 0", "ok"),
        ("NVLink", "ok"),
        ("NUMA", "ok"),
    ]
    assert found["NUMA"].found == "GPU 0: node 0"


def test_memory_that_is_broken_is_missing() -> None:
    assert judged(cards=CARDS.replace("Disabled, 0", "Disabled, 2"))["GPU 0"].verdict == "missing"


def test_a_card_that_reports_little_is_shown_with_what_it_reports() -> None:
    (finding,) = judge_cards("0, Tesla, 1.0, [N/A], [N/A], [N/A], [N/A], [N/A]\n")
    assert (finding.verdict, finding.found) == ("ok", "Tesla, driver 1.0")


def test_a_machine_without_a_driver_says_what_it_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (finding,) = examine_gpus()
    assert finding.verdict == "note"
    assert "cannot be seen" in finding.advice
