"""File systems of fsspec by URL, for tables and results: buckets through obstore, all others as fsspec knows them."""

from __future__ import annotations

import sys
from typing import Any, Final

import fsspec

from serin.machine import environment
from serin.store.objects import is_bucket

_AHEAD_BYTES: Final = 8 << 20
_REMOTE: Final = (("aiohttp", "ClientError"), ("obstore.exceptions", "BaseError"))


def file_system(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL or path, and the path in it."""
    if is_bucket(url):
        scheme, _, path = url.partition("://")
        return _bucket_system(scheme), path.rstrip("/")
    system, path = fsspec.core.url_to_fs(url)
    return system, path


def delta_options() -> dict[str, str] | None:
    """What deltalake must know of an object store beside its variables: files are read over plain HTTP too, where the
    endpoint says so."""
    endpoint = environment.text("AWS_ENDPOINT_URL_S3") or environment.text("AWS_ENDPOINT_URL") or ""
    return {"allow_http": "true"} if endpoint.startswith("http://") else None


def remote_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What the file systems in use raise besides OSError (no credentials, no endpoint that answers), and `others`."""
    own = (getattr(sys.modules[module], name) for module, name in _REMOTE if module in sys.modules)
    return (*others, *own)


def reason_of(error: Exception, url: str = "") -> str:
    """Returns what a message says of an error. `url`: for which a package is missing."""
    if isinstance(error, ImportError):
        package = "pip install 'serin[s3]'" if is_bucket(url) else "install that package"
        return f"{error}; {package}"
    return str(error).partition("\n\nDebug source")[0]  # of obstore


def _bucket_system(scheme: str) -> Any:
    """A path in it begins with the bucket."""
    from obstore.fsspec import FsspecStore  # it is in an extra

    from serin.store.bucket import PATIENT, bucket_client

    class BucketSystem(FsspecStore):
        protocol = scheme
        cachable = False

        def _construct_store(self, bucket: str) -> Any:
            return bucket_client(f"{scheme}://{bucket}", PATIENT)

        async def _find(self, path: str, maxdepth: object = None, detail: bool = False, **_: object) -> Any:  # noqa: ARG002
            """All files below it in one listing, which also serves `info`."""
            bucket, inner = self._split_path(path)
            found = await self._construct_store(bucket).list(inner or None).collect_async()
            files = {}
            for each in found:
                name = f"{bucket}/{each['path']}"
                files[name] = {"name": name, "type": "file", "size": each["size"], "e_tag": each["e_tag"]}
                self.dircache.setdefault(self._parent(name), []).append(files[name])
            return files if detail else sorted(files)

        def _open(self, path: str, mode: str = "rb", **settings: Any) -> Any:  # type: ignore[override]
            if mode == "rb":  # where there is none, obstore's file would fail again when it is closed
                settings["size"] = self.info(path)["size"]
            return super()._open(path, mode, **{**settings, "buffer_size": _AHEAD_BYTES})

    system: Any = BucketSystem
    return system()
