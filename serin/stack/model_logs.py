"""What was written about one model: by its servers, by the controller, and by the gateway."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from serin.errors import NameInvalid
from serin.host.wiring import build_gateway, controller_process
from serin.spec.names import valid_model_name
from serin.store.artifacts import Release

_LOOK_S = 0.3
_TAIL_BYTES = 4_000_000  # of a log that is searched for a model's lines
_ERROR = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """A file, and how its lines are shown: None for one that is about something else."""

    name: str
    path: Path
    show: Callable[[str], str | None]


def find_logs(home: Path, model: str) -> list[LogSource]:
    """The logs in which something about `model` may be; none for a model that was never served here."""
    valid_model_name(model)
    releases = [
        LogSource(name=path.stem, path=path, show=lambda line: line)
        for path in sorted((home / "releases" / "logs").glob(f"{model}-*.log"))
        if _is_of(path.stem, model)
    ]
    if not releases and not (home / "rollouts" / model).is_dir():
        return []
    gateway = build_gateway(home)
    return [
        *releases,
        LogSource(name="controller", path=controller_process(home).log, show=_mentions(model)),
        LogSource(name="failed requests", path=gateway.log, show=_failed(model)),
        LogSource(name="refusals", path=gateway.refusals, show=_refused(model)),
        LogSource(name="gateway", path=gateway.process().log, show=lambda line: line),
    ]


def last_lines(source: LogSource, count: int) -> list[str]:
    text, _ = _read(source.path, None)
    shown = [found for line in text.splitlines() if (found := source.show(line)) is not None]
    return shown[-count:]


def follow_logs(home: Path, model: str) -> Iterator[tuple[str, str]]:
    """Yields each line that is written after this call with the name of its source, forever. Releases that are started
    later are included."""
    return _follow(home, model, {source.path: _size(source.path) for source in find_logs(home, model)})


def _follow(home: Path, model: str, offsets: dict[Path, int]) -> Iterator[tuple[str, str]]:
    while True:
        for source in find_logs(home, model):
            text, offsets[source.path] = _read(source.path, offsets.get(source.path, 0))
            for line in text.splitlines():
                if (found := source.show(line)) is not None:
                    yield source.name, found
        time.sleep(_LOOK_S)


def _read(path: Path, offset: int | None) -> tuple[str, int]:
    """The whole lines after `offset`, and where they end. None: those at the end of the file."""
    try:
        with path.open("rb") as file:
            size = _size(path)
            if offset is None:
                offset = max(size - _TAIL_BYTES, 0)
            elif size < offset:
                offset = 0  # it was rotated
            file.seek(offset)
            whole, newline, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return "", 0
    return whole.decode(errors="replace"), offset + len(whole) + len(newline)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_of(name: str, model: str) -> bool:
    try:
        return Release.parse(name).model == model
    except NameInvalid:
        return False


def _mentions(model: str) -> Callable[[str], str | None]:
    def show(line: str) -> str | None:
        return line if f"{model}-v" in line or f"{model!r}" in line or f" {model}:" in line else None

    return show


def _failed(model: str) -> Callable[[str], str | None]:
    def show(line: str) -> str | None:
        if f'"{model}"' not in line:
            return None
        found = _json(line)
        failed = found.get("model") == model and (_number(found, "code") >= _ERROR or _number(found, "grpc"))
        return line if failed else None

    return show


def _refused(model: str) -> Callable[[str], str | None]:
    path = f"/v2/models/{model}"

    def show(line: str) -> str | None:
        asked = str(_json(line).get("path", ""))
        return line if asked == path or asked.startswith(f"{path}/") else None

    return show


def _json(line: str) -> dict[str, object]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}  # cut by a crash
    return found if isinstance(found, dict) else {}


def _number(found: dict[str, object], key: str) -> int:
    value = found.get(key)
    return int(value) if isinstance(value, int | str) and str(value).isdigit() else 0
