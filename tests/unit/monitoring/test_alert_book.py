"""The alert book: alerts are deduplicated by key, durable, and can be acknowledged and silenced."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import AlertRefused, ReceiverRefused
from serin.monitoring.alerts import outbox as outboxes
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.book import AlertBook, book_file, read_alerts
from serin.monitoring.alerts.outbox import Message, Outbox
from serin.monitoring.alerts.receivers import ReceiverFile

T = 1_800_000_000.0
ALERT = Alert(
    key="flights/objective/availability",
    kind="objective",
    model="flights",
    release="flights-3",
    severity="ticket",
    title="flights fails 2% of its requests",
    text="The error budget of 30 days is used up in two days at this rate.",
    since=T - 300,
    facts={"burn": 20.0},
)


def _due(home: Path, now: float) -> list[tuple[str, str]]:
    return [(each.receiver, each.event) for each in Outbox(home).due(now)]


def _send_all(home: Path, now: float) -> list[Message]:
    outbox, sent = Outbox(home), []
    while messages := outbox.due(now):
        for message in messages:
            outbox.record_sent(message)
            sent.append(message)
    return sent


def test_an_alert_that_fires_again_and_again_is_one_alert_and_one_message(tmp_path: Path) -> None:
    book = AlertBook(tmp_path)
    for second in range(0, 120, 10):
        book.fire(replace(ALERT, text=f"now {second}"), T + second)
    view = read_alerts(tmp_path, "flights", now=T + 120)
    (found,) = view.open
    assert (found.fired, found.seen, found.alert.text) == (T, T + 90, "now 90")
    assert found.alert.facts == {"burn": 20.0}
    assert [(each.receiver, each.event) for each in _send_all(tmp_path, T + 120)] == [
        ("log", "fired"),
        ("prefect", "fired"),
    ]
    book.resolve(ALERT.key, T + 200)
    book.resolve(ALERT.key, T + 210)
    assert _due(tmp_path, T + 210) == [("log", "resolved"), ("prefect", "resolved")]
    (past,) = read_alerts(tmp_path, now=T + 210).resolved
    assert past.resolved == T + 200
    book.fire(ALERT, T + 300)
    assert read_alerts(tmp_path, now=T + 300).open[0].id != past.id


def test_a_rise_in_severity_is_a_message_and_a_fall_is_none(tmp_path: Path) -> None:
    book = AlertBook(tmp_path)
    book.fire(ALERT, T)
    assert len(_send_all(tmp_path, T)) == 2
    book.fire(replace(ALERT, severity="page"), T + 1)
    assert len(_send_all(tmp_path, T + 1)) == 2
    book.fire(ALERT, T + 2)
    assert _due(tmp_path, T + 2) == []
    assert read_alerts(tmp_path).open[0].alert.severity == "ticket"


def test_the_beginning_of_an_alert_moves_back_and_never_forward(tmp_path: Path) -> None:
    book = AlertBook(tmp_path)
    for step, since in enumerate((T - 300, T - 900, T)):
        book.fire(replace(ALERT, since=since), T + 60 * step)
    assert read_alerts(tmp_path).open[0].alert.since == T - 900


def test_an_alert_is_acknowledged_by_a_person_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    book = AlertBook(tmp_path)
    book.fire(ALERT, T)
    book.acknowledge(ALERT.key, by="ada", note="on it", now=T + 5)
    (found,) = read_alerts(tmp_path).open
    assert (found.acknowledged, found.acknowledged_by, found.note) == (T + 5, "ada", "on it")
    with pytest.raises(AlertRefused, match="did you mean 'flights/objective/availability'"):
        book.acknowledge("flights/objective/availabilty", by="ada", now=T)
    assert [(line.event, line.by) for line in read_alerts(tmp_path, lines=9).journal] == [
        ("acknowledged", "ada"),
        ("fired", "serin"),
    ]


@pytest.mark.parametrize("whom", [{"pattern": "flights/objective/*"}, {"model": "flights"}])
def test_a_silence_holds_messages_back_until_its_end(tmp_path: Path, whom: dict[str, str]) -> None:
    book = AlertBook(tmp_path)
    ReceiverFile(tmp_path).add("team", "https://example.org/hook")
    book.silence(**whom, until=T + 600, by="ada", now=T)
    book.fire(ALERT, T + 10)
    assert [each.receiver for each in _send_all(tmp_path, T + 20)] == ["log", "prefect"]
    assert read_alerts(tmp_path, now=T + 20).open[0].silenced_until == T + 600
    book.fire(replace(ALERT, key="taxis/objective/availability", model="taxis"), T + 30)
    assert ("team", "fired") in _due(tmp_path, T + 30)
    _send_all(tmp_path, T + 30)
    assert _due(tmp_path, T + 601) == [("team", "fired")]


def test_an_alert_that_begins_and_ends_in_a_silence_reaches_nobody(tmp_path: Path) -> None:
    book = AlertBook(tmp_path)
    ReceiverFile(tmp_path).add("team", "https://example.org/hook")
    silence = book.silence(model="flights", until=T + 600, by="ada", now=T)
    book.fire(ALERT, T + 10)
    book.resolve(ALERT.key, T + 20)
    assert {each.receiver for each in _send_all(tmp_path, T + 700)} == {"log", "prefect"}
    book.fire(ALERT, T + 30)
    book.end_silence(silence.id, by="ada", now=T + 40)
    assert "team" in {each.receiver for each in _send_all(tmp_path, T + 41)}


def test_messages_are_tried_again_later_and_later_and_given_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outboxes, "_MOST_ATTEMPTS", 12)
    AlertBook(tmp_path).fire(ALERT, T)
    outbox, now, pauses = Outbox(tmp_path), T, []
    while messages := [each for each in outbox.due(now) if each.receiver == "prefect"]:
        alive = outbox.record_failure(messages[0], "ConnectionRefusedError", now)
        pause = 1.0
        while alive and not any(each.receiver == "prefect" for each in outbox.due(now + pause)):
            pause *= 2
        pauses.append(pause)
        now += pause
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512, 1]
    (record,) = [each for each in read_alerts(tmp_path).receivers if each.name == "prefect"]
    assert (record.given_up, record.failed_attempts, record.problem) == (
        1,
        len(pauses),
        "ConnectionRefusedError",
    )


def test_a_clock_that_is_set_back_does_not_hold_messages_back(tmp_path: Path) -> None:
    AlertBook(tmp_path).fire(ALERT, T)
    outbox = Outbox(tmp_path)
    for message in outbox.due(T):
        outbox.record_failure(message, "timeout", T)
    assert _due(tmp_path, T) == []
    assert len(_due(tmp_path, T - 86_400)) == 2


def test_a_receiver_with_too_many_messages_loses_the_oldest_and_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outboxes, "MOST_PENDING", 20)
    book = AlertBook(tmp_path)
    for number in range(15):
        book.fire(replace(ALERT, key=f"flights/drift/{number}"), T)
        book.resolve(f"flights/drift/{number}", T)
    assert Outbox(tmp_path).drop_excess() == 20
    assert Outbox(tmp_path).drop_excess() == 0
    records = {each.name: each for each in read_alerts(tmp_path).receivers}
    assert (records["log"].pending, records["log"].dropped) == (20, 10)
    Outbox(tmp_path).cancel("log")
    assert {each.receiver for each in Outbox(tmp_path).due(T)} == {"prefect"}


def test_an_alert_is_not_lost_when_the_process_is_killed_after_it_fired(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from serin.monitoring.alerts.book import AlertBook
from tests.unit.monitoring.test_alert_book import ALERT, T
AlertBook(Path({str(tmp_path)!r})).fire(ALERT, T)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -9
    assert read_alerts(tmp_path).open[0].alert == ALERT
    assert len(_due(tmp_path, T)) == 2


def test_a_damaged_book_is_put_aside_and_a_new_one_begins(tmp_path: Path) -> None:
    path = book_file(tmp_path).path
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 100)
    assert read_alerts(tmp_path).open == ()
    AlertBook(tmp_path).fire(ALERT, T)
    assert len(read_alerts(tmp_path).open) == 1
    (aside,) = path.parent.glob("book.broken-*")
    assert aside.read_bytes().startswith(b"not a database")


def test_an_alert_fires_although_the_file_of_receivers_is_damaged(tmp_path: Path) -> None:
    receivers = ReceiverFile(tmp_path)
    receivers.add("team", "https://example.org/hook")
    receivers.path.write_text("{")
    AlertBook(tmp_path).fire(ALERT, T)
    assert _due(tmp_path, T) == [("log", "fired"), ("prefect", "fired")]


def test_a_home_without_a_book_has_no_alerts_and_gets_no_files(tmp_path: Path) -> None:
    assert read_alerts(tmp_path).open == ()
    AlertBook(tmp_path).resolve("flights/drift/carrier", T)
    assert list(tmp_path.iterdir()) == []


def test_receivers_are_private_and_their_urls_are_never_shown(tmp_path: Path) -> None:
    receivers = ReceiverFile(tmp_path)
    hook = receivers.add("team", "https://bot:s3cret@hooks.example.org:8443/T0KEN?key=s3cret")
    mail = receivers.add("mail", "mailtos://ada:s3cret@example.org")
    assert receivers.path.stat().st_mode & 0o777 == 0o600
    assert receivers.path.parent.stat().st_mode & 0o777 == 0o700
    assert (hook.shown, mail.shown) == ("https://hooks.example.org:8443/...", "mailtos://...")
    assert "s3cret" not in repr(receivers.read()) + str(receivers.read())
    assert [each.name for each in receivers.read()] == ["team", "mail"]
    receivers.remove("team")
    assert [each.name for each in receivers.read()] == ["mail"]


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("log", "https://a.org/s3cret"),
        ("No Name", "https://a.org/s3cret"),
        ("team", "s3cret"),
        ("team", "https:///s3cret"),
        ("team", "https://a.org:port/s3cret"),
        ("team", "https://a.org/s3cret and more"),
    ],
)
def test_a_receiver_that_cannot_be_used_is_refused_without_its_secret(
    tmp_path: Path, name: str, url: str
) -> None:
    with pytest.raises(ReceiverRefused) as refusal:
        ReceiverFile(tmp_path).add(name, url)
    assert "s3cret" not in str(refusal.value)
    assert ReceiverFile(tmp_path).read() == ()


def test_an_alert_needs_no_disk(tmp_path: Path) -> None:
    home, memory = tmp_path / "home", tmp_path / "memory"
    (home / "stack").mkdir(parents=True)
    memory.mkdir()
    (home / "stack" / "sockets").symlink_to(memory)
    (home / "alerts").write_text("in the way of the book, as a full disk is")
    book = AlertBook(home)
    for _ in range(2):
        book.fire(ALERT, T)
    assert [message.event for message in Outbox(memory).due(T)] == ["fired", "fired"], (
        "log and Prefect, once each"
    )
    (home / "alerts").unlink()
    book.fire(ALERT, T)
    assert len(read_alerts(home).open) == 1
    assert read_alerts(memory).open == ()
    book.resolve(ALERT.key, T + 60)
    assert read_alerts(home).open == ()
