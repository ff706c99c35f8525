"""Leaves a line in the audit log for each command that is an act (spec/roles.py): who, on what, and how it ended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer

from serin.errors import SerinError
from serin.machine import environment
from serin.machine.audit import write_act

_ABOUT: Final = (
    "name",
    "key",
    "pattern",
    "number",
    "model",
    "spec",
    "run",
    "host",
    "tables",
    "folder",
    "pool",
)
"""The parameters that say what a command is about, the first one first. Others may be secret or personal."""
_WHY: Final = ("why", "note")
_TOLD: Final = {*_ABOUT, *_WHY}
_SHOW_WITHOUT_OPTIONS: Final = ("captures forget", "gc", "trust policy")
_NEEDS_AN_EMPTY_HOME: Final = "backup restore"


def audit_commands(path: str, command: Any) -> None:
    """Makes a command, or those of a group, leave their lines. `path`: its name with those of its groups."""
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            audit_commands(f"{path} {name}", each)
    elif command.callback is not None:
        defaults = {each.name: each.default for each in command.params if each.param_type_name == "option"}
        command.callback = _audited(path, command.callback, defaults)


def _audited(act: str, run: Callable[..., Any], defaults: Mapping[str, Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_audited(**given: Any) -> Any:
        from serin.spec.roles import ACTS  # here: `serin --help` does not pay for pydantic

        if ACTS.get(act) not in ("release", "administer"):
            return run(**given)
        options = [
            name for name, usual in defaults.items() if _is_given(given[name], usual) and name not in _TOLD
        ]
        with _line(act, given, [f"--{name.replace('_', '-')}" for name in options]):
            return run(**given)

    return run_audited


def _is_given(value: Any, usual: Any) -> bool:
    return bool(
        value != usual and (value or usual)
    )  # an option that may be repeated is empty when it is not given


@contextmanager
def _line(act: str, given: Mapping[str, Any], options: Sequence[str]) -> Iterator[None]:
    """`options`: the names of those that were given, without their values."""
    outcome = "interrupted"
    try:
        yield
        outcome = "done"
    except SerinError as error:
        outcome = f"failed: {type(error).__name__}"  # its text may name what a line must not hold
        raise
    except typer.Exit as ended:
        outcome = "done" if ended.exit_code == 0 else f"ended with exit code {ended.exit_code}"
        raise
    except Exception as error:
        outcome = f"failed: {type(error).__name__}"
        raise
    finally:
        shows = act in _SHOW_WITHOUT_OPTIONS and not options
        if not shows and (act != _NEEDS_AN_EMPTY_HOME or outcome == "done"):
            write_act(
                environment.home(),
                who=environment.actor(),
                act=" ".join((act, *options)),
                about=_first(given, _ABOUT),
                outcome=outcome,
                why=_first(given, _WHY),
            )


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> str:
    found = (given.get(name) for name in names)
    return next((str(each) for each in found if each and not isinstance(each, list | tuple)), "")
