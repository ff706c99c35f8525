"""The secret that the stack's Prefect server asks for."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serin.errors import StackError
from serin.stack.host.standing import stack_environment
from serin.stack.prefect.login import login_file, make_login, read_login
from serin.stack.prefect.processes import prefect_environment, prefect_server

URL = "http://127.0.0.1:4200/api"


def test_a_login_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    assert read_login(tmp_path) is None
    made = make_login(tmp_path)
    assert make_login(tmp_path) == read_login(tmp_path) == made
    user, password = made.split(":")
    assert user == "serin"
    assert len(password) >= 40
    assert stat.S_IMODE(login_file(tmp_path).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["prefect-login"]


def test_all_who_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make_login, [tmp_path] * 32))) == 1


def test_two_homes_have_two_logins(tmp_path: Path) -> None:
    assert make_login(tmp_path / "one") != make_login(tmp_path / "two")


def test_a_login_that_others_could_read_is_refused(tmp_path: Path) -> None:
    make_login(tmp_path)
    login_file(tmp_path).chmod(0o644)
    with pytest.raises(StackError, match=r"can be read by others; run `serin down`, remove it"):
        make_login(tmp_path)


@pytest.mark.parametrize("content", ["", "password", "serin:", "a:b:c"])
def test_a_file_without_a_login_is_refused(tmp_path: Path, content: str) -> None:
    login_file(tmp_path).touch(mode=0o600)
    login_file(tmp_path).write_text(content)
    with pytest.raises(StackError, match="contains no login"):
        read_login(tmp_path)


def test_our_own_server_wants_what_its_clients_bring_and_pickles_nothing(tmp_path: Path) -> None:
    server, client = prefect_server(tmp_path, 4200).environment, prefect_environment(tmp_path, URL, own=True)
    login = read_login(tmp_path)
    assert server["PREFECT_SERVER_API_AUTH_STRING"] == client["PREFECT_API_AUTH_STRING"] == login
    assert server["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] == "true"
    assert client["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"
    assert "PREFECT_SERVER_API_AUTH_STRING" not in client


def test_nobody_elses_server_gets_our_login_and_no_served_model_gets_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "theirs")
    foreign = prefect_environment(tmp_path, "https://prefect.example/api", own=False)
    assert foreign["PREFECT_API_KEY"] == "theirs"
    assert not login_file(tmp_path).exists()
    assert "PREFECT_API_KEY" not in stack_environment(tmp_path)
    assert "PREFECT_API_KEY" not in prefect_environment(tmp_path, URL, own=True)
