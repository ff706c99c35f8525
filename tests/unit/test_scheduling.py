"""Tests that share something dear share a worker, which begins with the longest."""

from __future__ import annotations

import pytest

from tests.scheduling import order, scope

SHARED = {("tests/e2e/stack", "stack"): "stack", ("tests", "prefect_server"): "flows"}


def test_a_stack_and_a_prefect_server_are_started_once(request: pytest.FixtureRequest) -> None:
    """Of all tests that are run now: each worker knows them all."""
    others = []
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        for name, made in item._fixtureinfo.name2fixturedefs.items():
            wanted = SHARED.get((made[-1].baseid, name))
            if wanted not in (None, scope(item.nodeid)):
                others.append(item.nodeid)
    assert others == [], "they would start another one: see tests/scheduling.py"


def test_long_tests_come_before_short_ones_and_those_of_one_scope_together() -> None:
    tests = [
        "tests/unit/test_errors.py::test_a",
        "tests/e2e/test_client.py::test_a",
        "tests/tasks/test_train.py::test_a",
        "tests/e2e/stack/test_stack_pipeline.py::test_a[tests/unit]",
        "tests/flows/test_retrain.py::test_a",
        "tests/e2e/stack/test_stack.py::test_a",
    ]
    scopes = [scope(test) for test in sorted(tests, key=order)]
    assert scopes == [
        "stack",
        "stack",
        "flows",
        "flows",
        "tests/e2e/test_client.py",
        "tests/unit/test_errors.py",
    ]
