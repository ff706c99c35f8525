from pathlib import Path

from benchmarks.race import Lap, Result
from benchmarks.scale.benchmark import last_line, table
from benchmarks.scale.evidence_load import EvidenceCost, at_one_gateway, at_three_gateways, write_logs
from benchmarks.scale.host_race import HostCosts
from benchmarks.scale.hosts_benchmark import last_line as hosts_line

CONTROLLERS = {
    10: {"settled_ms": 5.0, "shifting_ms": 9.0, "shifting_wall_ms": 12.0, "memory_mb": 120.0},
    100: {"settled_ms": 50.0, "shifting_ms": 80.0, "shifting_wall_ms": 100.0, "memory_mb": 130.0},
}


def pair(names: tuple[str, str], three: float) -> dict[str, Result]:
    seconds = {names[0]: (1.0, 2.0, 4.0), names[1]: (three, 2 * three, 4 * three)}
    return {
        name: Result(role="ours", laps=tuple(Lap(seconds=each, peak_bytes=1) for each in laps))
        for name, laps in seconds.items()
    }


def test_costs_of_three_are_compared_with_one_within_a_round() -> None:
    evidence = EvidenceCost(lines=1000, results=pair(("one gateway", "three gateways"), 1.1))
    line = {name: round(value, 3) for name, value in last_line(evidence, CONTROLLERS).items()}
    assert line == {
        "models": 1.0,
        "tick_cpu_ms": 80.0,
        "controller_mb": 130.0,
        "evidence_lines_per_s": 454.545,
        "evidence_3": 1.1,
    }
    assert "80.0 ms" in "\n".join(table(CONTROLLERS))


def test_three_hosts_are_judged_by_the_stage_that_loses_most() -> None:
    etl, training = (pair(("one host", "three hosts"), times) for times in (1.05, 1.15))
    line = hosts_line(HostCosts(etl=etl, training=training))
    assert {name: round(value, 3) for name, value in line.items()} == {
        "hosts_3": 1.15,
        "hosts_3_etl": 1.05,
        "hosts_3_training": 1.15,
    }
    assert set(hosts_line(HostCosts(etl=etl))) == {"hosts_3", "hosts_3_etl"}


def test_three_gateways_judge_the_same_requests_as_one(tmp_path: Path) -> None:
    logs = write_logs(tmp_path, 6000)
    assert sum(log.read_bytes().count(b"\n") for log in logs[1:]) == 6000
    end = 1_800_000_100.0
    assert at_three_gateways(logs[1:], end).to_json() == at_one_gateway(logs[0], end).to_json()
