"""Opens the objects and files of a store by its URL, and asks whether it answers."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Final

from serin.errors import ObjectExists, StoreError, StoreNotConditional, StoreUnreachable
from serin.store.objects import Files, FolderObjects, Objects, is_bucket

_CLIENT_S: Final = 10.0


def open_objects(url: str) -> Objects:
    """Returns the objects under the URL of a store (`environment.store_url()`): a folder, `file://` or a bucket."""
    if is_bucket(url):
        from serin.store.bucket import BucketObjects  # obstore is in an extra

        return BucketObjects(url)
    if "://" in url and not url.startswith("file://"):
        raise StoreNotConditional(url=url)
    return FolderObjects(Path(url.removeprefix("file://")))


def open_files(url: str) -> Files:
    """Returns the files of a bucket."""
    if not is_bucket(url):
        raise StoreNotConditional(url=url)
    from serin.store.bucket import BucketFiles

    return BucketFiles(url)


def check_conditional(objects: Objects) -> None:
    """Raises StoreNotConditional for a store that accepts conditional writes and ignores the condition."""
    key = f"cluster/probe/{secrets.token_hex(8)}.json"
    try:
        objects.create(key, b'"first"')
        try:
            objects.create(key, b'"second"')
        except ObjectExists:
            return
        raise StoreNotConditional(url=objects.url)
    finally:
        objects.remove(key)


class StoreProbe:
    """Asks a store for an answer, beside the caller. A store that hangs, also a file system, holds up nobody."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._problem: StoreError | OSError | None = None
        self._asked, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._ask, name="store-probe", daemon=True).start()

    def check(self, within_s: float) -> None:
        """Raises StoreUnreachable unless the store answers in time; the time to make a client does not count."""
        self._asked.wait(_CLIENT_S)
        if not self._ended.wait(within_s):
            raise StoreUnreachable(url=self._url, reason=f"it does not answer within {within_s:g} s")
        if isinstance(self._problem, OSError):
            raise StoreUnreachable(url=self._url, reason=str(self._problem)) from self._problem
        if self._problem is not None:
            raise self._problem

    def _ask(self) -> None:
        try:
            objects = open_objects(self._url)
            self._asked.set()
            objects.read("cluster/probe/answer.json")
        except StoreNotConditional:
            pass  # it is not shared: nobody waits for it
        except (StoreError, OSError) as error:
            self._problem = error
        finally:
            self._asked.set()
            self._ended.set()
