"""The hosts benchmark: what three hosts cost over one on the same cores, in the ETL and with --full in training."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.machine import machine
from benchmarks.report import Report
from benchmarks.scale.host_race import HostCosts, measure_hosts


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    found = measure_hosts(full=full, say=say)
    costs = found if isinstance(found, HostCosts) else None
    return Report(
        benchmark="hosts",
        mode="full" if full else "quick",
        environment=machine(),
        cases={name: dict(results) for name, results in costs.cases.items()} if costs else {},
        line=last_line(costs) if costs else {},
        notes=[
            "hosts are network namespaces on the same cores; both contenders have three processes and one store",
            "training (with --full): rows/s of the ranks, without the start of processes",
            *([] if costs else [f"no figures of hosts: {found}"]),
        ],
    )


def last_line(costs: HostCosts) -> dict[str, float]:
    ratios = {
        f"hosts_3_{name}": results["three hosts"].times_as_long_as(results["one host"])
        for name, results in costs.named.items()
    }
    return {"hosts_3": max(ratios.values()), **ratios}
