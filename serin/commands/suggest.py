"""A group of commands that suggests the right command for an unknown one."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

MEANT = {
    "abort": "`serin rollout abort MODEL` ends a rollout and keeps the live version.",
    "cancel": "`serin runs cancel RUN` cancels a run.",
    "delete": "`serin models delete MODEL` deletes versions.",
    "fit": "`serin train SPEC` trains.",
    "list": "`serin models list` lists models, `serin runs` runs.",
    "ls": "`serin models list` lists models, `serin runs` runs.",
    "promote": "`serin rollout promote MODEL` promotes a candidate.",
    "ps": "`serin status` shows the stack.",
    "restart": "`serin down` and `serin up` restart the stack.",
    "rollback": "`serin rollout rollback MODEL` returns to an earlier version.",
    "score": "`serin predict MODEL ROWS` scores rows.",
    "serve": "`serin up` starts serving, `serin rollout start MODEL` rolls a version out.",
    "start": "`serin up` starts the stack.",
    "stop": "`serin down` stops the stack, `serin retire MODEL` takes one model out of service.",
    "tls": "`serin up --tls-cert CERT --tls-key KEY` switches TLS on, also in a stack that is up.",
    "undeploy": "`serin retire MODEL` takes a model out of service.",
    "validate": "`serin check SPEC` checks a spec.",
}
"""Names that people know from other tools, and the command that does it."""


class SuggestingGroup(TyperGroup):
    """Suggests the right command for names from other tools; typer itself suggests similar spellings."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # ctx: a type that typer does not export
        meant = MEANT.get(args[0]) if args else None
        if meant is not None and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. {meant}")
        return super().resolve_command(ctx, args)
