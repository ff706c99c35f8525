"""The log of a run with lines of other processes, and its end as the events of a real server report it."""

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, State

from serin.pipeline.follow_files import PROCESSES, following, rank_line, triton_line
from serin.training.launch.processes import pass_on
from serin.training.launch.progress import Follower, progress_file
from tasks.run_end import RunEnd, listening_for_end
from tasks.run_log import Thinned, passing
from tests.fakes.gpus import write_inventory


class Lines(list[tuple[float, str]]):
    def say(self, line: str, created: float) -> None:
        self.append((created, line))

    @property
    def texts(self) -> list[str]:
        return [line for _, line in self]


def test_of_lines_that_differ_only_in_numbers_some_and_the_last_are_logged_in_their_order() -> None:
    told = Lines()
    less = Thinned(told.say, every_s=10.0)
    for step in range(1, 26):
        less(f"epoch 1/2, step {step:,}/30, loss {1 / step:.4f}", float(step))
    less("epoch 1/2 done: valid_auc 0.9", 25.5)
    less.flush()
    assert [(created, line.partition(", loss")[0]) for created, line in told] == [
        (1.0, "epoch 1/2, step 1/30"),
        (11.0, "epoch 1/2, step 11/30"),
        (21.0, "epoch 1/2, step 21/30"),
        (25.0, "epoch 1/2, step 25/30"),
        (25.5, "epoch 1/2 done: valid_auc 0.9"),
    ]


def test_a_held_line_is_logged_with_its_own_time_before_a_later_line_of_another_shape() -> None:
    told = Lines()
    less = Thinned(told.say)
    epochs = ["epoch 1/3 done: auc 0.7", "epoch 2/3 done: auc 0.6", "epoch 3/3 done: auc 0.8 (best so far)"]
    for at, line in enumerate(epochs):
        less(line, at / 10)
    less("it is slow", 0.35, say=told.say)
    assert told == [*((at / 10, line) for at, line in enumerate(epochs)), (0.35, "it is slow")]


def test_a_line_of_a_new_shape_is_always_logged() -> None:
    told = Lines()
    less = Thinned(told.say)
    for line in ("reading flights", "reading weather", "fitted 3 features"):
        less(line, 1.0)
    assert told.texts == ["reading flights", "reading weather", "fitted 3 features"]


def test_progress_of_a_training_is_logged_with_the_time_of_the_worker(tmp_path: Path) -> None:
    told, follower = Lines(), Follower(tmp_path)
    progress_file(tmp_path).write_text(
        "".join(
            json.dumps({"t": 100.0 + at, "event": "note", "text": f"note {'x' * at}"}) + "\n"
            for at in range(3)
        )
    )
    with passing(told.say, told.say):
        pass_on(follower, lambda _: None)
    assert told == [(100.0, "note "), (101.0, "note x"), (102.0, "note xx")]


def test_a_file_that_appears_and_grows_is_followed_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "attempt-001.log").write_text("of an earlier attempt\n")
    told: list[str] = []
    heard = threading.Event()

    def say(line: str) -> None:
        told.append(line)
        heard.set()

    with following(lambda: tmp_path.glob("attempt-*.log"), say, label=rank_line):
        log = tmp_path / "attempt-002.log"
        log.write_text("warming up\nrank 1: out of pa")
        assert heard.wait(20), "nothing was passed on while it ran"
        with log.open("a") as file:
            file.write("tience\nunfinished")
    assert told == ["rank 0: warming up", "rank 1: out of patience"]


@pytest.mark.parametrize(
    ("line", "worth"),
    [
        ("I1115 08:00:00.1 7 server.cc:592] +----", False),
        ("I1115 08:00:01.1 7 model_lifecycle.cc:839] successfully loaded 'flights'", True),
        ("E1115 08:00:02.1 7 model_lifecycle.cc:641] failed to load 'flights'", True),
        ("W1115 08:00:02.1 7 rate_limiter.cc:273] no resource is free", True),
    ],
)
def test_important_lines_of_tritons_log_are_logged_with_the_release(line: str, worth: bool) -> None:
    assert triton_line("flights-v2")(line) == (f"triton flights-v2: {line}" if worth else None)


@pytest.mark.parametrize("gpus", [(), ("GPU-a",)], ids=["without a GPU", "with a GPU"])
@pytest.mark.parametrize(
    "line",
    [
        'E1116 02:38:57.7 1 server.cc:241] "CudaDriverHelper has not been initialized."',
        'W1116 02:38:57.7 1 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"',
        'W1116 02:38:57.9 1 metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
    ],
)
def test_triton_missing_a_gpu_is_logged_only_where_there_is_one(
    line: str, gpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_INVENTORY", str(write_inventory(tmp_path, gpus)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (triton_line("flights-v2")(line) is not None) is bool(gpus)


def test_warnings_of_dask_are_logged_with_their_worker() -> None:
    ignored, told = Lines(), Lines()
    logger = logging.getLogger("distributed.nanny")
    with passing(ignored.say, told.say):
        logger.warning("Worker process %d was killed by signal %d", 7, 9)
        logger.warning("Compute Failed", extra={"worker": "tcp://127.0.0.1:1"})
        logger.info("nothing special")
    logger.warning("afterwards")
    assert told.texts == [
        "dask: Worker process 7 was killed by signal 9",
        "dask worker tcp://127.0.0.1:1: Compute Failed",
    ]
    assert ignored == []


def test_a_run_has_the_lines_of_its_own_stages_and_of_their_threads() -> None:
    logger, ranks = logging.getLogger("serin.pipeline.etl"), logging.getLogger(PROCESSES)

    async def one(name: str) -> list[str]:
        told = Lines()
        with passing(told.say, told.say):
            await asyncio.to_thread(logger.info, "%s reads", name)
            logger.warning("%s is slow", name)
            await asyncio.sleep(0)
        return told.texts

    async def both() -> list[list[str]]:
        return await asyncio.gather(one("first"), one("second"))

    assert asyncio.run(both()) == [["first reads", "first is slow"], ["second reads", "second is slow"]]
    told = Lines()
    with passing(told.say, told.say):
        thread = threading.Thread(target=ranks.debug, args=("rank 0: warm",))
        thread.start()
        thread.join()
    logger.info("afterwards")
    assert told.texts == ["rank 0: warm"]


@pytest.fixture(scope="module")
def logged_for_several_tests() -> None:
    ignored = Lines()
    with passing(ignored.say, ignored.say):
        pass


@pytest.mark.usefixtures("logged_for_several_tests")
def test_what_a_fixture_of_several_tests_logs_leaves_the_loggers_of_a_test_quiet() -> None:
    assert not logging.getLogger("serin").isEnabledFor(logging.INFO)
    assert not logging.getLogger(PROCESSES).isEnabledFor(logging.INFO)


LONG_S, SHORT_S = 600.0, 0.01
BOUND_S = 60.0  # shorter than LONG_S: a wait that only a timeout ends fails


@flow
async def stage() -> None: ...


def within_bound(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await work

    asyncio.run(bounded())


async def begin() -> UUID:
    async with get_client() as client:
        return UUID(str((await client.create_flow_run(stage, state=Running())).id))


async def set_state(run: UUID, state: State[Any]) -> None:
    async with get_client() as client:
        await client.set_flow_run_state(run, state, force=True)


async def news(end: RunEnd) -> bool:
    return await end.wait(asking_s=LONG_S, listening_s=LONG_S)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    "last", [Completed(), Failed(), Crashed(), Cancelled()], ids=lambda state: state.name
)
def test_the_end_of_a_run_wakes_who_waits_for_it(last: State[Any]) -> None:
    async def wait() -> None:
        run = await begin()
        async with listening_for_end(run) as end:
            assert await news(end), "the connection itself is news"
            await set_state(run, last)
            assert await news(end)

    within_bound(wait())


@pytest.mark.usefixtures("prefect_server")
def test_the_end_of_another_run_wakes_nobody() -> None:
    async def wait() -> None:
        run, other = await begin(), await begin()
        async with listening_for_end(run) as end, listening_for_end(other) as other_end:
            assert await news(end)
            assert await news(other_end)
            await set_state(other, Completed())
            assert await news(other_end), "the event was sent"
            assert not await end.wait(asking_s=SHORT_S, listening_s=SHORT_S)

    within_bound(wait())


@pytest.mark.parametrize("turns", range(3))
def test_a_cancellation_that_comes_with_the_news_is_not_lost(turns: int) -> None:
    async def wait() -> None:
        end = RunEnd(UUID(int=1))
        waiting = asyncio.create_task(news(end))
        await asyncio.sleep(SHORT_S)
        end._news.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        if waiting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            assert turns, "it has not had a turn yet"

    within_bound(wait())


def test_without_a_server_the_wait_is_a_pause_until_the_next_question() -> None:
    async def wait() -> None:
        async with listening_for_end(UUID(int=1)) as end:
            assert not await end.wait(asking_s=SHORT_S, listening_s=LONG_S)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens there
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{bound.getsockname()[1]}/api"}):
            within_bound(wait())
