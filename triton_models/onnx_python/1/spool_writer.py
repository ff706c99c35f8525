"""Records scored requests for the recorder, off the request path: onnx_native/spool_writer.h does the same in C++.

`add` copies a request's columns into a buffer of bounded size. A thread writes the buffer to a file about once a
second. When the buffer or the folder is full, or a file cannot be written, requests are dropped and counted. No
request waits for a file, and none fails because of the spool. The file beside this one, spool_blocks.py, is the format.
"""

import fcntl
import os
import secrets
import threading
import time
from pathlib import Path

from spool_blocks import COMPLETE, OPEN, Rows, is_drawn

_MOST_BYTES = 16 << 20  # of requests that wait to be written
_WAKE_BYTES = 4 << 20  # with so many, the writer does not wait for the end of the second
_INTERVAL_S, _LOG_INTERVAL_S = 0.9, 60.0


class SpoolWriter:
    """`folder`: of the release; each writer has a folder inside. `log`: takes a line when requests are dropped."""

    def __init__(self, folder, *, share, limit_bytes, header, is_text, log):
        self._root = Path(folder)
        self._own = self._root / f"{int(time.time() * 1000):012d}-{os.getpid()}-{secrets.token_hex(4)}"
        self._share, self._limit_bytes, self._header, self._log = share, limit_bytes, header, log
        self._is_text = is_text
        self._filling = Rows(is_text)
        self._sent = self._dropped = 0
        self._next, self._reported = 1, (0, 0)
        self._problem, self._logged = "", 0.0
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    def draws(self, request_id):
        return bool(request_id) and is_drawn(request_id, self._share)

    def add(self, request):
        """Takes a request, or drops it when too many wait."""
        with self._lock:
            self._sent += 1
            if self._filling.bytes < _MOST_BYTES:
                try:
                    self._filling.add(request)
                except (
                    ValueError,
                    TypeError,
                    MemoryError,
                ):  # some of its columns may be in the buffer already
                    self._dropped += self._filling.requests + 1
                    self._filling = Rows(self._is_text)
            else:
                self._dropped += 1
            wake = self._filling.bytes > _WAKE_BYTES
        if wake:
            self._wake.set()

    def drop(self):
        """Counts a request that was drawn and cannot be taken."""
        with self._lock:
            self._sent += 1
            self._dropped += 1

    def close(self):
        """Writes what is left."""
        self._stop = True
        self._wake.set()
        self._thread.join()

    def _run(self):
        last = False
        while not last:
            self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            last = self._stop
            with self._lock:
                rows, self._filling = self._filling, Rows(self._is_text)
                counted = self._sent, self._dropped
            if not self._write(rows, counted):
                with self._lock:
                    self._dropped += rows.requests

    def _write(self, rows, counted):
        """Returns False when the requests are lost."""
        if not rows.requests and counted == self._reported:
            return True
        try:
            self._try_to_write(rows, counted)
        except (OSError, MemoryError) as error:
            self._report(str(error))
            return False
        self._reported = counted
        return True

    def _report(self, problem):
        """Logs a new problem at once, and one that lasts every minute."""
        if problem != self._problem or time.monotonic() - self._logged >= _LOG_INTERVAL_S:
            self._problem, self._logged = problem, time.monotonic()
            self._log(f"recorded requests are dropped: {problem}")

    def _try_to_write(self, rows, counted):
        pieces = [self._header, *rows.encode(sent=counted[0], dropped=counted[1])]
        if self._used() + sum(map(len, pieces)) > self._limit_bytes:
            raise OSError(f"{self._root} holds {self._limit_bytes} bytes already; is the recorder running?")
        for folder in (self._root.parent, self._root, self._own):
            folder.mkdir(mode=0o700, exist_ok=True)
        scratch = self._own / f"{self._next:08d}{OPEN}"
        try:
            opened = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(opened, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the recorder sees that its writer lives
                file.writelines(pieces)
            scratch.rename(scratch.with_suffix(COMPLETE))
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        self._next += 1

    def _used(self):
        """Returns the bytes of all writers of this release."""
        total = 0
        for writer in _entries(self._root):
            for file in _entries(writer.path):
                try:
                    total += file.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # the recorder deletes files
                    continue
        return total


def _entries(folder):
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
