"""A package index on this machine: wheels that are written here, and a server whose downloads can be held up."""

import hashlib
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.kit.web import Handler, web_server


def write_wheel(
    index: Path, name: str, version: str, files: Mapping[str, str], needs: Sequence[str] = ()
) -> None:
    """A wheel of pure Python in the index, a folder that uv reads at its file:// URL. Its metadata is beside it, so
    that a wheel is downloaded only to be installed."""
    stem = name.replace("-", "_")
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{stem}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {each}\n" for each in needs)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    content = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    path.with_name(f"{path.name}.metadata").write_text(metadata)
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in content.items():
            wheel.writestr(member, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in (*content, f"{info}/RECORD")))
    links = [
        f'<a href="{each.name}#sha256={hashlib.sha256(each.read_bytes()).hexdigest()}" data-core-metadata="true">'
        f"{each.name}</a>"
        for each in sorted(folder.glob("*.whl"))
    ]
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")


class Gate:
    """Downloads of wheels wait for `opened`; each is in `asked`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.first, self.opened = threading.Event(), threading.Event()


@contextmanager
def served_index(index: Path, gate: Gate, host: str = "127.0.0.1") -> Iterator[str]:
    """The URL of a server of the index. `host`: an address of this machine."""

    class Serve(Handler):
        def do_HEAD(self) -> None:
            """uv asks for it when a requirement is the URL of a wheel."""
            path = index / self.path.strip("/")
            self.send_response(200 if path.is_file() else 404)
            self.send_header("content-length", str(path.stat().st_size) if path.is_file() else "0")
            self.end_headers()

        def do_GET(self) -> None:
            path = index / self.path.partition("?")[0].strip("/")
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file():
                self.answer(b"", 404)
                return
            if path.suffix == ".whl":
                gate.asked.append(path.name)
                gate.first.set()
                gate.opened.wait(120)
            kind = "text/html" if path.suffix == ".html" else "application/octet-stream"
            self.answer(path.read_bytes(), content_type=kind)

    with web_server(Serve, host) as port:
        yield f"http://{host}:{port}"
