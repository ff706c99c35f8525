"""kill -9 under load, with the supervisor and controller that a container has: everything comes back by itself."""

from __future__ import annotations

import os
import signal
import time

from serin.stack.parts import key_file
from tests.chaos.stage import Clients, Stage, stage


def granted(clients: Clients) -> int:
    """Requests that were answered with 200."""
    return clients.answered - sum(error.isdigit() for error in tuple(clients.errors))


def more_answers(scene: Stage, clients: Clients, count: int) -> None:
    before = granted(clients)
    scene.wait(lambda: granted(clients) >= before + count or None, f"{count} more answers", 60)


def strike(scene: Stage, clients: Clients, name: str) -> float:
    """Seconds from the death of a process to the first answers after it."""
    more_answers(scene, clients, 20)
    pid, errors = scene.pid(name), len(clients.errors)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    scene.wait(lambda: len(clients.errors) > errors or None, f"a request that {name} owes", 30)
    more_answers(scene, clients, 5)
    seconds = time.monotonic() - began
    assert scene.pid(name) != pid
    return seconds


def test_a_killed_triton_and_a_killed_envoy_are_back_within_seconds_and_guarded_as_before() -> None:
    with stage() as scene:
        release = scene.first_release()
        with Clients(scene.port, requests_per_s=60, count=6) as clients:
            for name in (release.name, "gateway"):
                print(f"{name} answers {strike(scene, clients, name):.1f} s after kill -9")

            key_file(scene.home).create("somebody")  # nobody tells the gateway; the controller sees it
            scene.wait(lambda: clients.errors[-20:] == ["401"] * 20 or None, "refusals", 30)
            before, errors = granted(clients), len(clients.errors)
            os.kill(scene.pid("gateway"), signal.SIGKILL)
            scene.wait(
                lambda: clients.errors[errors:].count("401") > 50 or None, "refusals by the next Envoy", 60
            )
            assert granted(clients) == before, "it asks for keys from its first request on"
