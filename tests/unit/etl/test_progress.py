from pathlib import Path

from serin.etl.dask_engine import DaskEngine, local_cluster
from serin.etl.process_engine import ProcessEngine
from serin.etl.progress import Progress


def test_a_long_pass_says_how_far_it_is_and_a_quick_one_nothing() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress(lines.append, clock=lambda: now[0])
    progress.begin("read")
    for done in range(1, 11):
        now[0] += 0.9
        progress(done, 10)
    assert lines == ["read: 3 of 10 pieces", "read: 6 of 10 pieces", "read: 9 of 10 pieces"]
    progress.begin("written")
    now[0] += 1.0
    progress(5, 10)
    assert len(lines) == 3


def test_every_engine_tells_of_every_piece(tmp_path: Path) -> None:
    with ProcessEngine(2) as engine, local_cluster(1) as client:
        for each in (engine, DaskEngine(client, scratch=tmp_path)):
            told: list[tuple[int, int]] = []
            each.tell = lambda done, total, told=told: told.append((done, total))
            assert each.collect(abs, each.hold(abs, [-1, -2, 3])) == [1, 2, 3]
            assert told[-3:] == [(1, 3), (2, 3), (3, 3)]
