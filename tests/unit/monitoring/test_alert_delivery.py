"""Alerts are delivered once each, whatever one of the receivers does."""

import contextlib
import json
import logging
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from serin.monitoring.alerts.alert import ReceiverRecord
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.monitoring.alerts.delivery import Channel, Delivery, LogChannel, channel_of, try_receiver
from serin.monitoring.alerts.outbox import Message, Outbox
from serin.monitoring.alerts.receivers import Receiver, ReceiverFile
from serin.watcher.alerts_duty import Channels, event
from tests.fakes.webhooks import webhook
from tests.kit.waiting import until
from tests.signals import kill_9
from tests.unit.monitoring.test_alert_book import ALERT


@contextlib.contextmanager
def delivering(home: Path, *, timeout_s: float = 15.0, **more: Channel) -> Iterator[None]:
    known = {each.name: channel_of(each) for each in ReceiverFile(home).read()}
    delivery = Delivery(Outbox(home), lambda: {**known, **more}, timeout_s=timeout_s)
    delivery.start()
    try:
        yield
    finally:
        delivery.close()


def record(home: Path, name: str) -> ReceiverRecord:
    return next(each for each in read_alerts(home).receivers if each.name == name)


def test_a_webhook_gets_each_alert_once_when_it_fires_and_once_when_it_resolves(tmp_path: Path) -> None:
    book = AlertBook(tmp_path)
    with webhook() as hook:
        ReceiverFile(tmp_path).add("team", hook.url)
        now = time.time()
        with delivering(tmp_path):
            for _ in range(3):
                book.fire(ALERT, now)
            hook.wait_for(1)
            book.resolve(ALERT.key, ended := time.time())
            fired, resolved = hook.wait_for(2)
            until(lambda: record(tmp_path, "team").pending == 0)
        assert len(hook.got) == 2
    assert (fired["event"], resolved["event"]) == ("fired", "resolved")
    assert (fired["format"], fired["version"], fired["resolved"]) == ("serin.alert", 1, None)
    assert (fired["key"], fired["severity"], fired["facts"]) == (ALERT.key, "ticket", {"burn": 20.0})
    assert resolved["resolved"] == ended
    assert fired["id"] != resolved["id"]


def test_a_webhook_that_hangs_delays_no_duty_and_no_other_receiver(tmp_path: Path) -> None:
    with webhook() as dead, webhook() as good:
        dead.hangs.set()
        ReceiverFile(tmp_path).add("dead", dead.url)
        ReceiverFile(tmp_path).add("good", good.url)
        book, now = AlertBook(tmp_path), time.time()
        with delivering(tmp_path, timeout_s=0.3):
            book.fire(ALERT, now)
            dead.wait_for_connections(1)
            book.fire(replace(ALERT, key="flights/drift/carrier"), now)
            assert [each["key"] for each in good.wait_for(2)] == [ALERT.key, "flights/drift/carrier"]
            until(lambda: record(tmp_path, "dead").failed_attempts >= 1)
            dead.hangs.clear()
            assert [each["key"] for each in dead.wait_for(2)] == [ALERT.key, "flights/drift/carrier"]
        assert len(good.got) == 2
    assert record(tmp_path, "dead").problem is None


def test_a_channel_that_never_returns_is_not_given_thread_after_thread(tmp_path: Path) -> None:
    released, threads = threading.Event(), []

    class Hanging:
        def send(self, message: Message) -> None:
            threads.append(message)
            released.wait(60)

    now = [time.time()]
    AlertBook(tmp_path).fire(ALERT, now[0])
    delivery = Delivery(Outbox(tmp_path), lambda: {"log": Hanging()}, timeout_s=0.01, clock=lambda: now[0])
    try:
        for _ in range(12):
            delivery._look()
            time.sleep(0.02)
            now[0] += 600
        assert len(threads) == 3
    finally:
        released.set()


@pytest.mark.parametrize("code", [301, 302, 307, 404, 500])
def test_an_answer_other_than_2xx_is_a_failure_that_does_not_show_the_url(tmp_path: Path, code: int) -> None:
    with webhook() as hook:
        hook.code = code
        receiver = ReceiverFile(tmp_path).add("team", hook.url)
        problem = try_receiver(receiver)
        assert hook.connections == 1, "redirections are not followed"
    assert problem == f"the receiver answered with {code}"


def test_a_server_that_is_not_there_is_a_failure_that_does_not_show_the_url(tmp_path: Path) -> None:
    with webhook() as hook:
        receiver = ReceiverFile(tmp_path).add("team", hook.url)
    assert try_receiver(receiver) == "Connection refused"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "the receiver closed the connection without an answer"),
        (b"hello\r\n\r\n", "the answer is not valid HTTP"),
    ],
)
def test_a_server_that_speaks_no_http_is_a_failure_in_plain_words(
    tmp_path: Path, answer: bytes, problem: str
) -> None:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = next(
                int(line.split(b":")[1]) for line in self.rfile if line.lower().startswith(b"content-length")
            )
            while self.rfile.readline().strip():
                pass
            self.rfile.read(length)
            self.wfile.write(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        receiver = ReceiverFile(tmp_path).add("team", f"http://127.0.0.1:{server.server_address[1]}/s3cret")
        assert try_receiver(receiver) == problem
        thread.join()


def test_every_test_message_has_its_own_id(tmp_path: Path) -> None:
    """A receiver drops what it has seen."""
    with webhook() as hook:
        receiver = ReceiverFile(tmp_path).add("team", hook.url)
        assert [try_receiver(receiver), try_receiver(receiver)] == [None, None]
    assert len({each["id"] for each in hook.got}) == 2


def test_a_hanging_receiver_fails_its_test_in_time(tmp_path: Path) -> None:
    with webhook() as hook:
        hook.hangs.set()
        problem = try_receiver(ReceiverFile(tmp_path).add("team", hook.url), timeout_s=0.2)
    assert problem == "no answer within 0.2 s"


def test_apprise_delivers_and_its_logger_shows_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("apprise")
    caplog.set_level(logging.DEBUG)
    with webhook() as hook:
        url = hook.url.replace("http://", "json://ada:s3cret@")
        receiver = ReceiverFile(tmp_path).add("chat", url)
        assert try_receiver(receiver) is None
        assert hook.got[0]["title"] == "Test message from Serin"
        AlertBook(tmp_path).fire(
            replace(ALERT, key="flights/drift/carrier", title="carrier drifted"), time.time()
        )
        AlertBook(tmp_path).fire(replace(ALERT, title="flights: too many requests fail"), time.time())
        with delivering(tmp_path):
            titles = {each["title"] for each in hook.wait_for(3)[1:]}
        assert titles == {"flights: carrier drifted", "flights: too many requests fail"}
        hook.code = 500
        assert try_receiver(receiver) == "the receiver did not accept the message"
    assert "s3cret" not in caplog.text
    assert "T0KEN" not in caplog.text


def test_after_a_kill_no_alert_is_lost_and_at_most_one_is_repeated(tmp_path: Path) -> None:
    keys = [f"flights/drift/{number}" for number in range(4)]
    with webhook() as hook:
        ReceiverFile(tmp_path).add("team", hook.url)
        for key in keys:
            AlertBook(tmp_path).fire(replace(ALERT, key=key), time.time())
        code = f"""
import time
from pathlib import Path
from serin.watcher.alerts_duty import AlertsDuty
AlertsDuty(Path({str(tmp_path)!r})).tick(0.0)
time.sleep(120)
"""
        first = subprocess.Popen([sys.executable, "-c", code])
        try:
            hook.wait_for(2)
        finally:
            kill_9(first.pid)
            first.wait()
        with delivering(tmp_path):
            until(lambda: record(tmp_path, "team").pending == 0)
        counts = [sum(each["key"] == key for each in hook.got) for key in keys]
        ids = {each["id"] for each in hook.got}
    assert min(counts) >= 1
    assert sum(counts) <= len(keys) + 1
    assert len(ids) == len(keys), "a repetition has the same id"


def test_a_log_line_names_the_alert_and_is_one_line_whatever_a_client_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    AlertBook(tmp_path).fire(replace(ALERT, text="carrier 'x\n2027-01-01 forged'"), time.time())
    with delivering(tmp_path, log=LogChannel()):
        until(lambda: record(tmp_path, "log").sent == 1)
    assert f"ALERT ticket {ALERT.key}: {ALERT.title}. carrier 'x 2027-01-01 forged'" in caplog.text


def test_an_event_for_prefect_has_the_model_as_resource_and_the_same_id_when_repeated(tmp_path: Path) -> None:
    AlertBook(tmp_path).fire(ALERT, 1_800_000_000.0)
    (_, message) = Outbox(tmp_path).due(1_800_000_000.0)
    sent = event(message)
    assert sent == event(message)
    assert sent["event"] == "serin.objective"
    assert sent["resource"]["prefect.resource.id"] == "serin.model.flights"
    assert sent["occurred"] == "2027-01-15T08:00:00+00:00"
    assert json.dumps(sent)


def test_no_receiver_is_told_that_a_closed_alert_is_resolved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("apprise")
    caplog.set_level(logging.INFO)
    book = AlertBook(tmp_path)
    with webhook() as hook, webhook() as chat:
        ReceiverFile(tmp_path).add("team", hook.url)
        ReceiverFile(tmp_path).add("chat", chat.url.replace("http://", "json://"))
        with delivering(tmp_path, log=LogChannel()):
            book.fire(ALERT, time.time())
            hook.wait_for(1)
            chat.wait_for(1)
            book.resolve(ALERT.key, time.time(), closed="version 1 is not watched")
            posted, shown = hook.wait_for(2)[1], chat.wait_for(2)[1]
            until(lambda: record(tmp_path, "log").sent == 2)
    outbox = Outbox(tmp_path)
    outbox.record_sent(*outbox.due(time.time()))
    (ending,) = outbox.due(time.time())
    assert (posted["event"], posted["facts"]["closed"]) == ("closed", "version 1 is not watched")
    assert shown["title"] == f"Closed: {ALERT.title}"
    assert shown["message"].startswith("closed: version 1 is not watched")
    assert shown["type"] == "info"
    assert event(ending)["event"] == "serin.objective.closed"
    assert f"closed: version 1 is not watched {ALERT.key}" in caplog.text
    assert "resolved" not in caplog.text


def test_receivers_that_are_added_or_removed_are_noticed(tmp_path: Path) -> None:
    channels, receivers = Channels(tmp_path, tmp_path), ReceiverFile(tmp_path)
    assert set(channels()) == {"log", "prefect"}
    receivers.add("team", "https://example.org/hook")
    assert set(channels()) == {"log", "prefect", "team"}
    receivers.remove("team")
    assert set(channels()) == {"log", "prefect"}


def test_a_receiver_that_cannot_be_used_here_keeps_its_messages(tmp_path: Path) -> None:
    pytest.importorskip("apprise")
    ReceiverFile(tmp_path).add("chat", "unheard-of://s3cret")
    AlertBook(tmp_path).fire(ALERT, time.time())
    channel = Channels(tmp_path, tmp_path)()["chat"]
    delivery = Delivery(Outbox(tmp_path), lambda: {"chat": channel})
    delivery.start()
    until(lambda: record(tmp_path, "chat").failed_attempts == 1)
    delivery.close()
    found = record(tmp_path, "chat")
    assert found.pending == 1
    assert "apprise cannot use this URL" in str(found.problem)
    assert "s3cret" not in str(found.problem)


def test_the_receiver_type_is_chosen_by_the_scheme() -> None:
    kinds = {
        url: Receiver(name="a", url=url).is_webhook for url in ("https://a.org", "HTTP://a.org", "slack://a")
    }
    assert kinds == {"https://a.org": True, "HTTP://a.org": True, "slack://a": False}
