"""The files of the repository, for tests that read sources instead of running them."""

import ast
import gc
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST = (3, 11)


@cache
def repository_files() -> tuple[str, ...]:
    """Tracked files and those that would be tracked, as paths relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return tuple(
        sorted(name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file())
    )


def python_files(*folders: str) -> list[str]:
    """Python files under `folders` (all when none is named)."""
    starts = tuple(f"{folder}/" for folder in folders)
    return [
        name
        for name in repository_files()
        if name.endswith(".py") and (not starts or name.startswith(starts))
    ]


@cache
def tree(name: str) -> ast.Module:
    """Parsed as the oldest Python that Serin runs on does."""
    parsed = ast.parse((ROOT / name).read_text(encoding="utf-8"), filename=name, feature_version=OLDEST)
    gc.freeze()  # it stays: no collection looks through it
    return parsed


@cache
def nodes(name: str) -> tuple[ast.AST, ...]:
    """Everything in a file."""
    return tuple(ast.walk(tree(name)))


def imported_modules(name: str) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, anywhere in it, with the line. Type-checking-only imports count too."""
    for node in nodes(name):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            # Prefect loads the worker type by its entry point, under another package name.
            message = f"{name}:{node.lineno}: a relative import; write the whole name"
            assert name.startswith("deployments/workers/"), message
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno
