"""A server on loopback that answers at once, or, when told to, not for a while: what a load generator must see."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class PausingServer:
    """`answer(number)` gives the bytes for the request with this number; None closes the connection instead."""

    answer: Callable[[int], bytes | None]
    answered: int = 0
    heads: list[bytes] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _listener: socket.socket = field(default_factory=socket.socket)
    _sockets: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(taken)
            threading.Thread(target=self._serve, args=(taken,), daemon=True).start()

    def _serve(self, taken: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test has ended, or the client has left
            self._answer_each(taken)

    def _answer_each(self, taken: socket.socket) -> None:
        pending = b""
        while data := taken.recv(65536):
            pending += data
            while b"\r\n\r\n" in pending:
                head, _, rest = pending.partition(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                if len(rest) < length:
                    break
                pending = rest[length:]
                with self._lock:  # one at a time: a pause is everybody's
                    self.heads.append(head)
                    number, self.answered = self.answered, self.answered + 1
                    reply = self.answer(number)
                if reply is None:
                    taken.close()
                    return
                taken.sendall(reply)


@contextmanager
def serving(answer: Callable[[int], bytes | None] = lambda _: ANSWER) -> Iterator[PausingServer]:
    server = PausingServer(answer)
    server._listener.bind(("127.0.0.1", 0))
    server._listener.listen(64)
    threading.Thread(target=server._accept, daemon=True).start()
    try:
        yield server
    finally:
        server._listener.shutdown(socket.SHUT_RDWR)
        server._listener.close()
        for taken in server._sockets:
            taken.close()


def pauses_once(at: int, seconds: float) -> Callable[[int], bytes]:
    def answer(number: int) -> bytes:
        if number == at:
            time.sleep(seconds)
        return ANSWER

    return answer
