"""Who gets in: secrets, sessions, attempts, hosts and headers."""

import os
import socket
import stat
from pathlib import Path

import pytest
from starlette.requests import Request

from serin.console.guard import Attempts, source_of
from serin.console.state import cookie2session, new_session, session2cookie
from serin.errors import SpecError, StackUnusable
from serin.host.console import (
    ACCOUNTS,
    Account,
    ConsoleSettings,
    account_secret,
    read_settings,
    rotate_secret,
    secret_file,
)
from tests.unit.console.conftest import BASE, visitor


def test_without_a_session_every_view_leads_to_the_login_and_no_stream_opens(home: Path) -> None:
    stranger = visitor(home)
    assert stranger.get("/models/delays/rollout").headers["location"] == "/login?next=/models/delays/rollout"
    assert stranger.get("/live/rollouts").status_code == 401
    assert stranger.get("/login").status_code == 200


@pytest.mark.parametrize("account", ACCOUNTS)
def test_the_secret_of_a_role_opens_a_session_that_scripts_and_other_sites_cannot_use(
    home: Path, account: Account
) -> None:
    somebody = visitor(home)
    answer = somebody.post("/login", {"secret": account_secret(home, account), "next": "/runs"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert account_secret(home, account) not in cookie
    assert f"</span>console {account}</span>" in somebody.get("/runs").text


@pytest.mark.parametrize("name", ["Olga <b>Operator</b>", "a" * 61, "two\nlines", "Ann (console operator)"])
def test_a_name_that_would_have_to_be_changed_is_refused(home: Path, name: str) -> None:
    answer = visitor(home).post("/login", {"secret": account_secret(home, "operator"), "name": name})
    assert answer.status_code == 400
    assert "A name has at most 60 characters" in answer.text
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("name", ["Olga Operator", "Siobhán O'Brien, jr.", "李雷", "ann@example.com"])
def test_every_page_says_as_whom_actions_are_journalled(home: Path, name: str) -> None:
    shown = visitor(home).login("operator", name).get("/runs").text
    assert f"{name} (console operator)</span>" in shown.replace("&#39;", "'")


def test_a_wrong_secret_is_refused_and_not_repeated(home: Path) -> None:
    stranger = visitor(home)
    answer = stranger.post("/login", {"secret": "guess-me-not", "name": "x", "next": "/runs"})
    assert answer.status_code == 401
    assert 'name="next" value="/runs"' in answer.text  # the next attempt leads to the page that was wanted
    assert "guess-me-not" not in answer.text
    assert "set-cookie" not in answer.headers


def test_wrong_secrets_wait_longer_each_time_and_a_right_one_never_does(home: Path) -> None:
    console = visitor(home)
    for _ in range(5):
        assert console.post("/login", {"secret": "wrong"}).status_code == 401
    for _ in range(20):
        answer = console.post("/login", {"secret": "wrong"})
        assert answer.status_code == 429
        assert 0 < int(answer.headers["retry-after"]) <= 2
    for account in ACCOUNTS:
        assert console.post("/login", {"secret": account_secret(home, account)}).status_code == 303


def test_the_delay_doubles_up_to_a_limit_and_is_for_one_source() -> None:
    now = [0.0]
    attempts = Attempts(clock=lambda: now[0])
    assert [attempts.fail("a") for _ in range(5)] == [0.0] * 5
    delays = []
    for _ in range(12):
        delays.append(attempts.fail("a"))
        assert attempts.fail("a") == delays[-1]  # what comes too early does not count
        now[0] += delays[-1]
        assert attempts.fail("a") == 0.0
    assert delays == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 900.0, 900.0, 900.0]
    assert attempts.fail("b") == 0.0
    now[0] += 900.0 + 3600.0
    assert [attempts.fail("a") for _ in range(5)] == [0.0] * 5


def test_many_sources_take_little_memory_and_do_not_end_the_wait_of_one_that_keeps_on() -> None:
    attempts = Attempts(clock=lambda: 0.0)
    for number in range(30_000):
        attempts.fail(f"10.0.{number >> 8}.{number & 255}")
        waits = attempts.fail("busy")
    assert waits == 2.0
    assert len(attempts._sources) == 10_000


def test_users_of_this_machine_are_told_apart_by_their_account() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            scope = {"type": "http", "server": ("127.0.0.1", port), "client": client.getsockname()}
            assert source_of(Request(scope)) == f"127.0.0.1 (user {os.getuid()})"
    assert source_of(Request(scope)) == "127.0.0.1"  # the connection is gone


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),  # one host has 2^64 addresses
        ("testclient", "testclient"),
    ],
)
def test_a_source_elsewhere_is_its_address_or_network(address: str, source: str) -> None:
    scope = {"type": "http", "server": ("127.0.0.1", 8090), "client": (address, 1)}
    assert source_of(Request(scope)) == source
    assert source_of(Request({"type": "http", "client": None})) == "?"


def test_a_new_secret_ends_the_sessions_of_its_role_and_no_others(home: Path) -> None:
    operator, viewer = visitor(home).login("operator"), visitor(home).login("viewer")
    before = account_secret(home, "operator")
    assert rotate_secret(home, "operator") != before
    assert operator.get("/alerts").status_code == 303
    assert viewer.get("/alerts").status_code == 200


def test_a_changed_or_expired_cookie_is_no_session(home: Path) -> None:
    good = new_session("viewer", "ann", lasts_s=60)
    cookie = session2cookie(home, good)
    assert cookie2session(home, cookie) == good
    content, _, signature = cookie.rpartition(".")
    forged = session2cookie(home, new_session("operator", "ann", lasts_s=60)).rpartition(".")[0]
    for bad in (f"{forged}.{signature}", f"{content}.", content, "", "é.é", f"{cookie}0"):
        assert cookie2session(home, bad) is None
    assert cookie2session(home, session2cookie(home, new_session("viewer", "ann", lasts_s=-1))) is None


def test_secrets_are_private_files_and_one_that_others_can_read_is_refused(home: Path) -> None:
    account_secret(home, "viewer")
    file = secret_file(home, "viewer")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(StackUnusable, match="can be read by others"):
        account_secret(home, "viewer")


def test_logging_out_takes_the_session_away(home: Path) -> None:
    somebody = visitor(home).login("viewer")
    page = somebody.get("/alerts").text
    token = page.partition('name="csrf" value="')[2].partition('"')[0]
    assert somebody.post("/logout", {"csrf": "0" * 64}).status_code == 403
    assert somebody.get("/alerts").status_code == 200
    assert somebody.post("/logout", {"csrf": token}).status_code == 303
    assert somebody.get("/alerts").status_code == 303


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "x", "/a?b"])
def test_a_login_never_leads_to_another_site(home: Path, target: str) -> None:
    answer = visitor(home).post("/login", {"secret": account_secret(home, "viewer"), "next": target})
    assert answer.headers["location"] == "/"


def test_another_host_name_is_refused(home: Path) -> None:
    assert visitor(home, base="http://evil.example").get("/login").status_code == 421
    named = ConsoleSettings(url="https://serin.example.com")
    assert visitor(home, named, base="https://serin.example.com").get("/login").status_code == 200


def test_every_answer_carries_a_strict_policy(home: Path) -> None:
    for path in ("/login", "/", "/nothing", "/static/console.css"):
        headers = visitor(home).get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"


def test_behind_tls_the_cookie_is_for_tls_only(home: Path) -> None:
    secure = ConsoleSettings(url="https://serin.example.com")
    somebody = visitor(home, secure, base="https://serin.example.com")
    fields = {"secret": account_secret(home, "viewer")}
    answer = somebody.post("/login", fields, origin="https://serin.example.com")
    assert answer.headers["set-cookie"].startswith("__Host-serin=")
    assert "Secure" in answer.headers["set-cookie"]
    assert "max-age" in answer.headers["strict-transport-security"]


def test_a_login_form_of_another_site_is_refused(home: Path) -> None:
    fields = {"secret": account_secret(home, "viewer")}
    assert visitor(home).post("/login", fields, origin="http://evil.example").status_code == 403
    assert visitor(home).post("/login", fields, origin=None).status_code == 303
    assert visitor(home).post("/login", {"secret": "x" * 20_000}, origin=BASE).status_code == 413


OIDC = "oidc: {issuer: 'https://login.example.com', client_id: x"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("adress: x", "adress: unknown key; did you mean 'address'"),
        ("oidc: {issuer: 'https://login.example.com', client: x}", "oidc.client_id: is missing; add it"),
        ("sesion: 1h", "SERIN_CONSOLE"),
        ("url: serin.example.com", "must be a scheme and a host"),
        ("oidc: {issuer: 'http://login.example.com', client_id: x}", "must be an https URL"),
        ("oidc: {issuer: 'https://login.example.com', client_id: x}", "oidc.groups: is missing; add it"),
        (f"{OIDC}, groups: {{ml: [{{models: '*', role: view}}]}}}}", "url: is missing"),
        (f"{OIDC}, groups: {{ml: [{{models: '*', role: viewer}}]}}}}", "oidc.groups.ml.0.role: .*'release'"),
        (
            f"{OIDC}, groups: {{ml: [{{models: 'Fraud*', role: view}}]}}}}",
            "oidc.groups.ml.0.models: .*pattern",
        ),
        (f"{OIDC}, groups: {{ml: [{{model: fraud, role: view}}]}}}}", "did you mean 'models'"),
        (f"{OIDC}, groups: {{}}}}", "oidc.groups: .*at least 1"),
        ("secrets: false", "nobody can log in"),
        ("address: 0.0.0.0", "url: with address 0.0.0.0 other machines reach the console"),
        ("{address: 10.0.0.7, url: 'http://serin.example.com'}", "name the https address of the proxy"),
        ("[]", "must hold keys"),
    ],
)
def test_settings_that_cannot_be_used_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    file = tmp_path / "console.yaml"
    file.write_text(text)
    monkeypatch.setenv("SERIN_CONSOLE", str(file))
    with pytest.raises(SpecError, match=problem):
        read_settings()
    file.unlink()
    with pytest.raises(SpecError, match="there is no such file; correct SERIN_CONSOLE"):
        read_settings()
