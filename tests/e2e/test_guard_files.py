"""Every file that guards the gateway, damaged while it runs and before it starts again: it never answers more."""

import http.client
import ssl
from collections.abc import Callable
from pathlib import Path

from serin.errors import SerinError
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.envoy.keys import KeyFile
from serin.serving.envoy.tls import TlsFiles
from tests.e2e.serving_certificates import Authority
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import built_filter, lone_gateway

DAMAGES: dict[str, Callable[[Path], object]] = {
    "lost": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "corrupt": lambda path: path.write_bytes(b"\xff\x00{]"),
}


def ask(port: int, authority: Authority | None, key: str | None = None) -> int | str:
    """The status, by TLS where an authority is given; the error where there is no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    if authority:
        context = ssl.create_default_context(cadata=authority.certificate.decode())
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
    try:
        connection.request("GET", "/v2", headers={"authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def follow(gateway: Gateway) -> list[str]:
    """As the controller does; what it says about it."""
    said = []
    for each in (gateway.keys.follow, gateway.tls.follow):
        try:
            each()
        except SerinError as error:
            said.append(str(error))
    return said


def test_no_damage_to_a_guard_file_lets_anybody_in(tmp_path: Path) -> None:
    authority, files = Authority(), TlsFiles(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    authority.pair().write(files.certificate, files.key)
    with lone_gateway(tls=files) as (gateway, port, host):
        home = gateway.folder.parent
        keys = KeyFile(path=home / "keys.json", published=gateway.folder / "keys" / "keys.json")
        _, key = keys.create("ada")
        gateway.keys.follow()

        def answers() -> list[int | str]:
            return [ask(port, authority), ask(port, authority, key)]

        def closed() -> bool:
            return ask(port, authority) != 200 and not isinstance(ask(port, None), int)

        def start_again() -> bool:
            """False when the gateway is not even started."""
            host.kill(PROCESS_NAME)
            try:
                gateway.write_bootstrap(port, tls=files, request_filter=built_filter())
            except SerinError:
                return False
            host.start(gateway.process())
            wait_for("Envoy", gateway.ready, host)
            return True

        wait_for("the first refusal", lambda: answers() == [401, 200], host)
        guards = [keys.path, keys.mark, files.certificate, files.key]
        documents = [gateway.folder / name for name in ("keys/keys.json", "tls/tls.json", "tls.json")]
        guards += documents
        whole = {path: path.read_bytes() for path in guards}
        for path in guards:
            for name, damage in DAMAGES.items():
                damage(path)
                said = follow(gateway)
                if path == keys.path:
                    assert ["the gateway is closed" in line for line in said] == [True], name
                    wait_for("its end", lambda: answers() == [401, 503], host)
                assert closed(), (path, name)
                assert follow(gateway) == [], "said once"
                again = path == keys.path or (name == "lost" and path not in documents)  # each takes a second
                if again and start_again():
                    assert closed(), f"{path} {name}, after a start"
                    assert ask(port, authority, key) in (200, 503)
                for each, content in whole.items():
                    each.write_bytes(content)
                if host.state(PROCESS_NAME) != "running":
                    assert start_again()
                follow(gateway)
                wait_for("what was before", lambda: answers() == [401, 200], host)
