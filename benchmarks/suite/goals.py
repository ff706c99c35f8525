"""The goals of every benchmark on a CPU, by the names of its last line. benchmarks/gpu/parts.py has those of a GPU."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.suite.parts import Goal

GOALS: Mapping[str, Mapping[str, Goal]] = {
    "etl": {
        "polars_3m": Goal(least=2.0),
        "polars_join": Goal(least=1.2),
        "dask": Goal(least=5.0),
        "limit_3m": Goal(least=0.5),
        "limit_join": Goal(least=0.3),
        "peak_memory": Goal(most=1.5),
    },
    "loader": {"dataloader": Goal(least=20.0), "limit": Goal(least=0.8)},
    "training": {"eager": Goal(least=1.0), "limit": Goal(least=0.9)},
    "trees": {"pandas": Goal(least=1.0)},
    "bulk": {"pandas": Goal(least=1.0)},
    "parallel": {"ddp": Goal(least=0.95)},
    "runtime": {"best": Goal(least=0.9)},
    "serving": {
        "peer_behind_envoy": Goal(least=1.5),
        "peer_alone": Goal(least=2.5),
        "best_peer": Goal(least=1.0),
        "gateway_ms": Goal(most=0.5),
        "over_bare_envoy": Goal(most=1.1),
        "grpc": Goal(least=0.8),
    },
    "rollout": {
        "false_rollback": Goal(most=0.01),
        "sooner_than_kayenta": Goal(least=5.0),
        "sooner_than_flagger": Goal(least=5.0),
    },
    "elastic": {"replica_hours": Goal(most=0.5), "slow_over_fixed": Goal(most=1.0)},
    "watch": {
        "capture_cost": Goal(most=0.05),
        "capture_p99_ms": Goal(most=0.2),
        "false_alarms": Goal(most=3.8),
        "sooner_than_evidently": Goal(least=1.0),
        "log_lines_per_s": Goal(least=50_000),
    },
    "online": {"p99_added_ms": Goal(most=2.0), "unequal": Goal(most=0.0), "push_failed": Goal(most=0.0)},
    "quality": {"rank_behind": Goal(most=0.0), "network_gap": Goal(most=0.003)},
    "hosts": {"hosts_3": Goal(most=1.2)},
    "orchestration": {
        "flow_overhead": Goal(most=0.05),
        "placed_stage_s": Goal(most=1.5),
        "unchanged_flow_s": Goal(most=3.0),
        "unchanged_worker_s": Goal(most=20.0),
    },
}  # the shortest first: a run that is interrupted has most of them
