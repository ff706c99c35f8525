"""The group of all commands: it imports what it runs, has panels on its first page, and suggests the right command for
an unknown one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command_name, get_group
from typer.models import CommandInfo

from serin.commands.audited import audit_commands

MEANT = {
    "abort": "`serin rollout abort MODEL` ends a rollout and keeps the live version.",
    "cancel": "`serin runs cancel RUN` cancels a run.",
    "delete": "`serin models remove MODEL` removes versions.",
    "fit": "`serin train SPEC` trains.",
    "list": "`serin models list` lists models, `serin runs` runs.",
    "ls": "`serin models list` lists models, `serin runs` runs.",
    "promote": "`serin rollout promote MODEL` promotes a candidate.",
    "ps": "`serin status` shows the stack.",
    "restart": "`serin down` and `serin up` restart the stack.",
    "rollback": "`serin rollout rollback MODEL` returns to an earlier version.",
    "serve": "`serin up` starts serving, `serin rollout start MODEL` rolls a version out.",
    "start": "`serin up` starts the stack.",
    "stop": "`serin down` stops the stack, `serin retire MODEL` takes one model out of service.",
    "tls": "`serin up --tls-cert CERT --tls-key KEY` switches TLS on, also in a stack that is up.",
    "undeploy": "`serin retire MODEL` takes a model out of service.",
    "validate": "`serin check SPEC` checks a spec.",
}
"""Names that people know from other tools, and the command that does it."""


PANELS = {
    "Build": ("init", "check", "run", "etl", "train", "search", "export", "models", "runs"),
    "Serve": ("up", "down", "status", "rollout", "predict", "explain", "tune", "logs", "retire"),
    "Watch": ("slo", "drift", "quality", "labels", "captures", "alerts"),
    "Operate": ("doctor", "keys", "trust", "hosts", "gc", "backup"),
}
"""The first page of the help. The other commands are for services and for setting up: the reference has them."""


class SuggestingGroup(TyperGroup):
    """Suggests the right command for names from other tools; typer itself suggests similar spellings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        for panel, names in PANELS.items():
            with formatter.section(panel):
                width = formatter.width - 20
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # ctx: a type that typer does not export
        meant = MEANT.get(args[0]) if args else None
        if meant is not None and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. {meant}")
        return super().resolve_command(ctx, args)


class LazyCommands(Mapping[str, Any]):
    """Commands by name, in the order of help. A module is imported when one of its commands is asked for.

    `modules`: each module of this folder with the names that its `register` adds.
    """

    def __init__(self, commands: Mapping[str, Any], modules: Mapping[str, str]) -> None:
        self._commands: dict[str, Any] = dict(commands)
        self._modules = {name: module for module, names in modules.items() for name in names.split()}
        self._names = dict.fromkeys([*self._commands, *self._modules])

    def __getitem__(self, name: str) -> Any:
        if name not in self._commands:
            part = typer.Typer(rich_markup_mode=None)
            part.callback()(lambda: None)
            importlib.import_module(f"serin.commands.{self._modules[name]}").register(part)
            part.registered_commands = [each for each in part.registered_commands if _name(each) == name]
            part.registered_groups = [each for each in part.registered_groups if each.name == name]
            found = get_group(part).commands
            for each, command in found.items():
                audit_commands(each, command)
            self._commands |= found
        return self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _name(command: CommandInfo) -> str | None:
    return command.name or (command.callback and get_command_name(command.callback.__name__))
