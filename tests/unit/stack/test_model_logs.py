from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from serin.stack.model_logs import find_logs, follow_logs, last_lines
from serin.stack.wiring import build_gateway, controller_process


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two models, one of which has the other's name as its beginning."""
    logs = tmp_path / "releases" / "logs"
    logs.mkdir(parents=True)
    for name in ("flights-v1", "flights-v2", "flights-late-v1"):
        (logs / f"{name}.log").write_text(f"{name} begins\n{name} is ready\n")
    gateway, controller = build_gateway(tmp_path), controller_process(tmp_path).log
    gateway.log.parent.mkdir(parents=True)
    controller.parent.mkdir(parents=True, exist_ok=True)
    controller.write_text("flights-v2: promoted\nflights-late-v1: promoted\nthe controller has started\n")
    requests = [("flights", 200, None), ("flights", 503, None), ("flights", 200, "14"), ("taxis", 500, None)]
    rows = [{"model": model, "code": code, "grpc": grpc} for model, code, grpc in requests]
    gateway.log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    paths = ("/v2/models/flights/infer", "/v2/models/flights-late/infer", "/elsewhere")
    gateway.refusals.write_text("".join(f"{json.dumps({'code': 401, 'path': path})}\n" for path in paths))
    gateway.process().log.write_text("a warning of Envoy\n")
    return tmp_path


def shown(home: Path, model: str, count: int = 20) -> dict[str, list[str]]:
    return {source.name: last_lines(source, count) for source in find_logs(home, model)}


def test_a_model_s_logs_hold_its_own_lines_and_no_other_model_s(home: Path) -> None:
    found = shown(home, "flights")
    assert found["flights-v2"] == ["flights-v2 begins", "flights-v2 is ready"]
    assert found["controller"] == ["flights-v2: promoted"]
    assert [json.loads(line)["code"] for line in found["failed requests"]] == [503, 200]
    assert [json.loads(line)["path"] for line in found["refusals"]] == ["/v2/models/flights/infer"]
    assert found["gateway"] == ["a warning of Envoy"]
    assert sorted(found) == [
        "controller", "failed requests", "flights-v1", "flights-v2", "gateway", "refusals",
    ]  # fmt: skip
    assert shown(home, "flights", 1)["flights-v1"] == ["flights-v1 is ready"]
    assert find_logs(home, "trains") == []


def test_new_lines_are_followed_also_of_a_log_that_was_rotated_or_is_new(home: Path) -> None:
    lines = follow_logs(home, "flights")
    logs = home / "releases" / "logs"

    def after(write: str, name: str, *, new: bool = False) -> list[tuple[str, str]]:
        with (logs / f"{name}.log").open("w" if new else "a") as file:
            file.write(write)
        return list(islice(lines, write.count("\n")))

    assert after("one\n", "flights-v1") == [("flights-v1", "one")]
    assert after("two\nthree\n", "flights-v2") == [("flights-v2", "two"), ("flights-v2", "three")]
    assert after("short\n", "flights-v2", new=True) == [("flights-v2", "short")], "it was rotated"
    assert after("hello\n", "flights-v3") == [("flights-v3", "hello")]
