"""Every secret that a whole stack makes or is given, looked for wherever another user of the machine could find it.

Runs after the tests that share the stack: what they left behind is searched as well.
"""

import base64
import hashlib
import re
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from serin.host.state import running_stack
from serin.host.wiring import key_file
from serin.machine.in_memory import socket_folder
from tests.e2e import stranger
from tests.e2e.whole_stack import Stack, until
from tests.kit import web

_LARGEST = 100_000_000
LOOKS_SECRET = re.compile(rb"(?i)(token|passw|secret|auth|api.?key|credential)[^\0/]{0,20}[=:\0][^\0/]{8,}")
MAY_HOLD = {
    "prefect-login",
    "metrics-token",
    "keys.json",
    "gateway/keys/keys.json",
    "stack/conf.d/*.json",
    "stack/scratch/*/workspace.json",  # of Prefect's workers; `serin down` removes what is left
}


def spellings(secret: str) -> set[bytes]:
    """As it is, in a URL, and as a header of basic authentication has it."""
    return {secret.encode(), quote(secret, safe="").encode(), base64.b64encode(secret.encode())}


def ask(url: str, path: str, key: str) -> int:
    return web.ask(urlsplit(url).netloc, path, headers={"authorization": f"Bearer {key}"}).status


@pytest.fixture(scope="module")
def secrets_of(stack: Stack) -> dict[str, set[bytes]]:
    """By name: all ways in which it could be written. The key is one that the gateway has checked."""
    key = stack.ask("keys", "create", "searched", "--model", "none")["key"]
    gateway = running_stack(stack.home).gateway_url
    try:
        until(lambda: ask(gateway, "/v2/models/other", key) == 403, "the key is known", within_s=60)
        assert ask(gateway, f"/v2/models/none?key={key}", key) == 404
    finally:
        key_file(stack.home).require(False)  # for other tests; the controller sees it
        until(lambda: ask(gateway, "/v2", "") == 200, "nobody is asked any more", within_s=60)
    login = stack.login
    return {
        "the Prefect login": spellings(login) | spellings(login.partition(":")[2]),
        "an API key": spellings(key),
        "the hash of an API key": {hashlib.sha256(key.encode()).hexdigest().encode()},
        "a token of the caller's environment": spellings(stack.environment["TEAM_API_TOKEN"]),
    }


def held(content: bytes, secrets_of: dict[str, set[bytes]]) -> list[str]:
    return [name for name, forms in secrets_of.items() if any(form in content for form in forms)]


@pytest.mark.timeout(900)
def test_no_secret_is_on_a_command_line(stack: Stack, secrets_of: dict[str, set[bytes]]) -> None:
    """Nor anything that looks like one, whether this test knows it or not."""
    own = [line for line in stack.command_lines if str(stack.home).encode() in line]
    assert own
    for line in stack.command_lines:
        assert held(line, secrets_of) == [], line
    assert not [line for line in own if LOOKS_SECRET.search(line)]


@stranger.needs_root
@pytest.mark.timeout(900)
def test_another_user_reads_no_secret_of_a_process(stack: Stack, secrets_of: dict[str, set[bytes]]) -> None:
    pids = stack.processes()
    assert len(pids) > 6
    found = stranger.read(Path(f"/proc/{pid}/{file}") for pid in pids for file in ("cmdline", "environ"))
    assert any(content for path, content in found.items() if path.endswith("cmdline"))
    assert not [path for path, content in found.items() if path.endswith("environ") and content]
    for path, content in found.items():
        assert held(content, secrets_of) == [], path


@pytest.mark.timeout(900)
def test_secrets_are_in_few_files_which_are_their_owner_s_and_in_no_log(
    stack: Stack, secrets_of: dict[str, set[bytes]]
) -> None:
    searched, found = 0, {}
    for folder in (stack.home, socket_folder(stack.home)):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < _LARGEST:
                searched += 1
                if names := held(path.read_bytes(), secrets_of):
                    found[path.relative_to(folder)] = names
                    assert path.stat().st_mode & 0o077 == 0, f"{path} holds {names}"
    print(f"{searched} files searched; {len(found)} hold a secret: {', '.join(sorted(map(str, found)))}")
    for path, names in found.items():
        assert any(path.match(pattern) for pattern in MAY_HOLD), f"{path} holds {names}"
        assert "an API key" not in names, path
    assert {"prefect-login", "keys.json"} <= set(map(str, found)), "else nothing would be found at all"
    assert (stack.home / "prefect").stat().st_mode & 0o077 == 0, "its database holds more than is known here"
    assert [path for path in stack.home.rglob("prefect.db") if path.is_file()]
