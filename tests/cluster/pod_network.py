"""The network of the test kubelet: a bridge, a network namespace per pod, and a name server for Services.

There is no kube-proxy: a Service's name leads to its ready pods, as that of a headless Service does anyway. A pod's
border is guarded by rules of the kernel in its namespace.
"""

import contextlib
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tests.kit.threads import beside

_ANSWER_S = 5


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class PodNetwork:
    """Addresses of one /24; the node has the first."""

    def __init__(self, prefix: str, name: str) -> None:
        self.gateway = f"{prefix}.1"
        self._prefix, self._name, self._next = prefix, name, 9
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def bridge(self) -> str:
        return f"{self._name}-br"

    def add(self) -> tuple[str, str]:
        """Returns the network namespace and the address of a new pod."""
        with self._lock:  # two `ip netns add` at the same time fail
            self._next += 1
            number = self._next
            assert number < 255, "all addresses of the pod network were used"
            return self._add(f"{self._name}-{number}", f"{self._name}v{number}", f"{self._prefix}.{number}")

    def _add(self, space: str, link: str, address: str) -> tuple[str, str]:
        ip("netns", "add", space)
        self._names[space] = address
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", link, "master", self.bridge, "up")
        for command in (
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", space, *command)
        return space, address

    def guard(self, space: str, rules: Sequence[str]) -> None:
        """Lets through what the rules of iptables accept, the node's own traffic and answers; refuses the rest."""
        usual = [
            line
            for chain, side in (("INPUT", "-i"), ("OUTPUT", "-o"))
            for line in (
                f"-A {chain} {side} lo -j ACCEPT",
                f"-A {chain} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            )
        ]
        node = f"-A INPUT -s {self.gateway} -j ACCEPT"
        rest = ["-A INPUT -j REJECT", "-A OUTPUT -j REJECT", "COMMIT", ""]
        done = subprocess.run(
            ["ip", "netns", "exec", space, "iptables-restore", "--wait"],
            input="\n".join(["*filter", *usual, node, *rules, *rest]),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or space not in self._names, f"{space}: {done.stderr}"

    def remove(self, space: str) -> None:
        if self._names.pop(space, None) is not None:
            link = space.replace("-", "v")
            for command in (["ip", "link", "del", link], ["ip", "netns", "del", space]):
                subprocess.run(command, capture_output=True, check=False)

    @contextlib.contextmanager
    def up(self, resolve: Callable[[str], Sequence[str] | None]) -> Iterator[None]:
        """Makes the bridge and answers names. `resolve`: the addresses of a name; None for an unknown one."""
        subprocess.run(
            ["ip", "link", "del", self.bridge], capture_output=True, check=False
        )  # of a killed run
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind((self.gateway, 53))
        server.settimeout(0.2)
        stop = threading.Event()
        try:
            with server, beside(partial(_serve_names, server, resolve, stop), stop=stop):
                yield
        finally:
            for space in list(self._names):
                self.remove(space)
            subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)


def _serve_names(
    server: socket.socket, resolve: Callable[[str], Sequence[str] | None], stop: threading.Event
) -> None:
    while not stop.is_set():
        try:
            query, client = server.recvfrom(1500)
        except TimeoutError:
            continue
        with contextlib.suppress(ValueError, IndexError, OSError):
            server.sendto(_answer(query, resolve), client)


def _answer(query: bytes, resolve: Callable[[str], Sequence[str] | None]) -> bytes:
    """Answers a question for IPv4 addresses; other types exist but have no records."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
        at += 1 + query[at]
    kind = struct.unpack("!H", query[at + 1 : at + 3])[0]
    question = query[12 : at + 5]
    found = resolve(".".join(labels))
    addresses = list(found or ()) if kind == 1 else []
    flags = 0x8580 if found is not None else 0x8583
    head = query[:2] + struct.pack("!HHHHH", flags, 1, len(addresses), 0, 0)
    records = [
        b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, _ANSWER_S, 4) + socket.inet_aton(each) for each in addresses
    ]
    return head + question + b"".join(records)
