"""Resolves and installs packages with uv, beside those that are installed. Says what failed in one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from serin.errors import EnvironmentFailed, EnvironmentRefused, SerinError
from serin.machine import environment

_UNREACHABLE = ("Failed to fetch", "Request failed", "Failed to download", "Network connectivity is disabled")
_MOST_NAMED = 3
_ALIGN = "ask for what the worker has, or leave it out"


def resolve(asked: Sequence[Requirement], installed: Mapping[str, str]) -> list[str]:
    """The lines of a requirements file with what is lacking here, all versions exact. What is installed stays as it
    is: EnvironmentRefused when that cannot be."""
    asked = [one for one in asked if one.marker is None or one.marker.evaluate()]
    _refuse_conflicts({str(one): (one, installed[one.name]) for one in asked if one.name in installed})
    with tempfile.TemporaryDirectory(prefix="serin-uv-") as scratch:
        pins, wanted = Path(scratch) / "installed.txt", Path(scratch) / "wanted.txt"
        _write(pins, (f"{name}=={version}" for name, version in installed.items()))
        _write(wanted, map(str, asked))
        words = ("--dry-run", "--output-format", "json", "--break-system-packages")
        files = ("--constraints", str(pins), "--requirements", str(wanted))
        said = _run("pip", "install", *words, *files, installed=installed)
    urls = {one.name: str(one) for one in asked if one.url}
    found = [(canonicalize_name(each["name"]), each["version"]) for each in json.loads(said)["changes"]]
    # uv does not see what this process has on PYTHONPATH; by the pins it would be the same version.
    return [urls.get(name) or f"{name}=={version}" for name, version in found if name not in installed]


def resolve_lock(lock: Path, installed: Mapping[str, str]) -> list[str]:
    """The same for a uv.lock, with the digests of the files."""
    try:
        document = tomllib.loads(lock.read_text(encoding="utf-8"))
        project = next(
            each["name"] for each in document["package"] if set(each["source"]) & {"virtual", "editable"}
        )
        python = str(document["requires-python"])
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        raise EnvironmentRefused(reason=f"{lock} is not a uv.lock of a project ({error!r})") from error
    with tempfile.TemporaryDirectory(prefix="serin-uv-") as scratch:
        (Path(scratch) / "uv.lock").write_bytes(lock.read_bytes())
        head = f'[project]\nname = "{project}"\nversion = "0"\nrequires-python = "{python}"\n'
        (Path(scratch) / "pyproject.toml").write_text(head, encoding="utf-8")
        locked = dict(_exported(scratch))
        here = {name: (one, installed[name]) for name, (one, _) in locked.items() if name in installed}
        _refuse_conflicts(here)
        return [line for _, (_, line) in _exported(scratch, without=here)]


def install(lines: Sequence[str], target: Path) -> None:
    """Installs exactly these into the folder."""
    wanted = target.parent / "requirements.txt"
    _write(wanted, lines)
    hashes = ("--require-hashes",) if any("--hash=" in line for line in lines) else ()
    _run("pip", "install", "--no-deps", *hashes, "--target", str(target), "--requirements", str(wanted))


def _exported(project: str, *, without: Iterable[str] = ()) -> Iterator[tuple[str, tuple[Requirement, str]]]:
    """What this platform needs of a lock: by name the requirement, and its line. `without`: packages that are left out
    with all that only they need."""
    pruned = [word for name in without for word in ("--prune", name)]
    words = ("--frozen", "--no-dev", "--no-emit-project", "--no-header", "--no-annotate", *pruned)
    said = _run("export", *words, "--project", project)
    for line in filter(None, (each.strip() for each in said.replace("\\\n", " ").splitlines())):
        try:
            one = Requirement(line.partition(" --hash=")[0])
        except InvalidRequirement:
            raise EnvironmentRefused(
                reason=f"the lock holds {line}, which is not a package of an index"
            ) from None
        if one.marker is None or one.marker.evaluate():
            yield canonicalize_name(one.name), (one, line)


def _refuse_conflicts(both: Mapping[str, tuple[Requirement, str]]) -> None:
    """What is asked for and what is installed, by any name."""
    found = [
        f"{one.name}{one.specifier}{' @ ' + one.url if one.url else ''} is asked for and the worker has {version}"
        for one, version in both.values()
        if one.url or not one.specifier.contains(version, prereleases=True)
    ]
    if found:
        more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise EnvironmentRefused(reason=f"{', '.join(found[:_MOST_NAMED])}{more}; {_ALIGN}")


def _run(*words: str, installed: Mapping[str, str] | None = None) -> str:
    """The output of a uv command. Raises with what it says of its failure."""
    try:
        from uv import find_uv_bin

        program = find_uv_bin()
    except (ImportError, FileNotFoundError) as error:
        raise EnvironmentRefused(reason="uv is not installed here: pip install uv") from error
    done = subprocess.run(
        [program, *words, "--python", sys.executable, "--no-progress", *_cache()],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment.child_environment(VIRTUAL_ENV=None, PYTHONPATH=None),
    )
    if done.returncode:
        raise _failure(done.stderr, installed or {})
    return done.stdout


def _cache() -> tuple[str, ...]:
    """uv keeps what it has downloaded in the user's cache; in a container that may be read-only."""
    folder = environment.path("UV_CACHE_DIR") or environment.cache_folder().parent
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return () if os.access(there, os.W_OK | os.X_OK) else ("--no-cache",)


def _failure(said: str, installed: Mapping[str, str]) -> SerinError:
    """uv reports an error and its causes on lines. The URL of an index may hold a password."""
    _, _, text = re.sub(r"://[^/@\s]*@", "://", " ".join(said.split())).partition("error: ")
    parts = [part.strip(" .") for part in text.partition(" hint: ")[0].split(" cause: ")]
    if any(word in text for word in _UNREACHABLE):
        url = next(iter(re.findall(r"https?://[^\s`)]+|file://[^\s`)]+", text)), "the package index")
        return EnvironmentFailed(reason=f"{url} cannot be read ({parts[-1]}); is it reachable from here?")
    why = re.sub(r"^Because |, we can conclude that .*", "", parts[-1]) if len(parts) > 1 else parts[0]
    why = why.replace("you require", "the spec asks for")
    pins = [re.fullmatch(r"([\w.-]+)==([^\s,]+)", word.strip(",")) for word in why.split()]
    if pin := next((pin for pin in pins if pin and installed.get(pin[1]) == pin[2]), None):
        why = f"{why}; the worker has {pin[1]} {pin[2]}, which stays: {_ALIGN}"
    return EnvironmentRefused(reason=why or "uv failed without a message")


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
