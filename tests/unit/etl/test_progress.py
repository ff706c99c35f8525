import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.comm import connect

from serin.etl.engines.dask_engine import DaskEngine, local_cluster
from serin.etl.engines.process_engine import ProcessEngine
from serin.etl.engines.progress import Progress
from tests.logs import heard


def test_a_long_pass_says_how_far_it_is_and_a_quick_one_nothing() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress(clock=lambda: now[0])
    progress.begin("read")
    with heard(lines.append):
        for done in range(1, 11):
            now[0] += 0.9
            progress(done, 10)
    assert lines == ["read: 3 of 10 pieces", "read: 6 of 10 pieces", "read: 9 of 10 pieces"]
    progress.begin("written")
    now[0] += 1.0
    with heard(lines.append):
        progress(5, 10)
    assert len(lines) == 3


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with local_cluster(1) as found:
        yield found


def test_nobody_but_its_client_can_talk_to_a_local_cluster(client: Any) -> None:
    """Whoever can runs code on its workers; any user of the machine can reach the port."""
    address = client.scheduler.address
    careless = ssl.create_default_context()
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    for wanted, arguments in ((address.replace("tls:", "tcp:"), {}), (address, {"ssl_context": careless})):
        with pytest.raises(OSError, match=r"Timed out|in <T"):
            asyncio.run(connect(wanted, timeout=1, **arguments))


def test_every_engine_tells_of_every_piece(tmp_path: Path, client: Any) -> None:
    with ProcessEngine(2) as engine:
        for each in (engine, DaskEngine(client, scratch=tmp_path)):
            told: list[tuple[int, int]] = []
            each.tell = lambda done, total, told=told: told.append((done, total))
            assert each.collect(abs, each.hold(abs, [-1, -2, 3])) == [1, 2, 3]
            assert told[-3:] == [(1, 3), (2, 3), (3, 3)]
