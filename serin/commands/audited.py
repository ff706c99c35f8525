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
    "account",
)
"""The parameters that say what a command is about, the first one first. Others may be secret or personal."""
_WHY: Final = ("why", "note")
_VALUES: Final = ("role", "model", "check")
"""The options whose values say what was given to whom. Of others only the names are written."""
_VIEWS_WITH_LINES: Final = ("captures export",)  # recorded rows leave
_SHOW_WITHOUT_OPTIONS: Final = ("captures forget", "gc", "trust policy")
_NEEDS_AN_EMPTY_HOME: Final = "backup restore"


def audit_commands(path: str, command: Any) -> None:
    """Makes a command, or those of a group, leave their lines. `path`: its name with those of its groups."""
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            audit_commands(f"{path} {name}", each)
    elif command.callback is not None:
        options = [each for each in command.params if each.param_type_name == "option"]
        command.callback = _audited(path, command.callback, options)


def _audited(act: str, run: Callable[..., Any], options: Sequence[Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_audited(**given: Any) -> Any:
        from serin.spec.roles import ACTS  # here: `serin --help` does not pay for pydantic

        if ACTS.get(act) not in ("release", "administer") and act not in _VIEWS_WITH_LINES:
            return run(**given)
        told = {_first(given, _ABOUT)[0], *_WHY}
        written = [
            words for each in options if each.name not in told for words in _written(each, given[each.name])
        ]
        with _line(act, given, written):
            return run(**given)

    return run_audited


def _written(option: Any, value: Any) -> list[str]:
    """Returns an option as it was given, with its values where they may be written; empty: it was not given."""
    if value == option.default or not (value or option.default):  # one that may be repeated is empty then
        return []
    name = option.secondary_opts[0] if value is False and option.secondary_opts else option.opts[0]
    if option.name not in _VALUES:
        return [name]
    return [f"{name} {each}" for each in (value if isinstance(value, list | tuple) else [value])]


@contextmanager
def _line(act: str, given: Mapping[str, Any], options: Sequence[str]) -> Iterator[None]:
    """`options`: those that were given, as they are written."""
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
                who=f"{environment.account()}@{environment.host()}",
                act=" ".join((act, *options)),
                about=_first(given, _ABOUT)[1],
                outcome=outcome,
                why=_first(given, _WHY)[1],
            )


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, str]:
    """Returns the name and the value of the first of these parameters that has one."""
    found = ((name, given.get(name)) for name in names)
    return next(
        ((name, str(each)) for name, each in found if each and not isinstance(each, list | tuple)), ("", "")
    )
