"""How much memory and how many connections the gateway takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serin.errors import SpecError
from serin.machine.hardware import memory_bytes
from serin.serving.envoy.overload import CONNECTION_BUFFER_BYTES, default_connections, default_heap_bytes
from serin.stack.wiring import build_gateway

MB, GB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("memory", "heap", "connections"),
    [(512 * MB, 256 * MB, 1024), (4 * GB, GB, 4096), (24 * GB, 6 * GB, 20_000), (512 * GB, 8 * GB, 20_000)],
)
def test_the_gateway_s_limits_follow_the_machine_s_memory(memory: int, heap: int, connections: int) -> None:
    assert default_heap_bytes(memory) == heap
    assert default_connections(heap) == connections
    assert 2 * connections * CONNECTION_BUFFER_BYTES <= heap, "all of them may be slow at once"


def test_a_container_s_memory_counts_where_it_is_less_than_the_machine_s(tmp_path: Path) -> None:
    machine = memory_bytes(tmp_path)
    assert machine > 256 * MB
    for limit, found in ((str(200 * MB), 200 * MB), ("max", machine), (str(1 << 60), machine)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory_bytes(tmp_path) == found


def test_the_limit_can_be_set_and_what_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_GATEWAY_MEMORY", str(GB))
    document = json.loads(build_gateway(tmp_path).write_bootstrap(1).read_text())
    heap, connections = document["overload_manager"]["resource_monitors"]
    assert heap["typed_config"]["max_heap_size_bytes"] == GB
    assert connections["typed_config"]["max_active_downstream_connections"] == 4096
    for wrong in ("1GB", "1000", "-1"):
        monkeypatch.setenv("SERIN_GATEWAY_MEMORY", wrong)
        with pytest.raises(
            SpecError, match=r"(?s)SERIN_GATEWAY_MEMORY.*is not a number of bytes of at least"
        ):
            build_gateway(tmp_path)
