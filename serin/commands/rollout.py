"""Models in service: `serin rollout` reads journals and writes to the controller's inbox; `retire` and `logs`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from serin.commands.arguments import (
    Commands,
    DurationOption,
    Model,
    ModelVersion,
    Why,
    Yes,
    add_group,
    open_store,
)
from serin.commands.output import (
    Json,
    confirm,
    counted,
    say,
    show,
    show_json,
    show_problems,
    show_table,
    when,
    write_file,
)
from serin.errors import CommandRefused, NotFound, RolloutRefused, StoreError
from serin.machine import environment
from serin.spec.names import split_version

if TYPE_CHECKING:
    from serin.formats.serving.journal import Decision
    from serin.pipeline.elsewhere import Elsewhere
    from serin.rollout.decide.plan import Plan
    from serin.rollout.run.commands import Kind
    from serin.rollout.run.replay import Replay
    from serin.rollout.run.status import ModelStatus
    from serin.store.artifacts import Release

_ORDERS: Final[dict[Kind, str]] = {
    "pause": "Hold the rollout where it is.",
    "resume": "Let a held rollout continue.",
    "approve": "Allow the next step, where the spec (`rollout.approve`) or the store's policy asks a person.",
    "promote": "Give the candidate all traffic now, whatever the evidence.",
    "abort": "Send all traffic back to the live version and end the rollout.",
}
_JUDGED: Final = (
    "quantiles", "margin", "bad_margin", "tolerance_ms", "warmup_s", "false_rollback", "false_promotion",
    "error_tolerance", "max_error_share", "slo_ms", "max_slow_share",
)  # fmt: skip
Stable = Annotated[
    str | None,
    typer.Option("--stable", metavar="URL", help="A running server: http://host:port[,host:port]."),
]
Candidate = Annotated[
    str | None, typer.Option("--candidate", metavar="URL", help="The server that is to replace it.")
]
Spec = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        help="Use the plan of this spec; with --stable and --candidate, also its objectives, records and "
        "monitoring. [default: the version's own; of servers elsewhere that of the last rollout]",
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option(
        help="With --stable and --candidate: a Parquet file of rows that live ones are compared with, such as "
        "those of `serin captures export` (monitoring.drift, monitoring.quality)."
    ),
]
RequestTimeout = Annotated[
    float | None,
    DurationOption(
        "With --stable and --candidate: how long a request may take, such as 30s. "
        "[default: from the spec or the last rollout, else 5s]"
    ),
]
Follow = Annotated[bool, typer.Option(help="Show every decision until the rollout has ended.")]

_POLL_S: Final = 0.2


def register(app: typer.Typer) -> None:
    orders: Commands = {kind: _order(kind) for kind in _ORDERS}
    first: Commands = {"start": start, "status": status, "watch": watch}
    commands: Commands = {**first, **orders, "rollback": rollback, "report": report, "replay": replay}
    add_group(app, "rollout", "Roll out a model version step by step.", commands)
    for command in (logs, retire):
        app.command()(command)


def start(
    name: ModelVersion,
    stable: Stable = None,
    candidate: Candidate = None,
    spec: Spec = None,
    reference: Reference = None,
    request_timeout: RequestTimeout = None,
    follow: Follow = True,
    why: Why = "",
) -> None:
    """Roll out a version. [default: the newest] With --follow, exit code 0 means that it was promoted.

    With --stable and --candidate: between any two servers of the KServe v2 protocol. Clients call MODEL at the gateway;
    the second address of a URL is the server's gRPC port.
    """
    if stable is not None and candidate is not None and ":" not in name:
        from serin.pipeline.elsewhere import Elsewhere

        servers = Elsewhere(open_store(), name, spec=spec, timeout_s=request_timeout, reference=reference)
        release, plan = _take_in(name, servers, stable, candidate), servers.plan
    elif stable is not None or candidate is not None:
        raise typer.BadParameter("give MODEL:VERSION, or MODEL with both --stable and --candidate")
    elif request_timeout is not None or reference is not None:
        option = "--reference" if request_timeout is None else "--request-timeout"
        raise typer.BadParameter(f"{option} is for servers elsewhere; the spec of a version says it")
    else:
        bundle = open_store().find(name)
        release, plan = bundle.release, _plan_of(spec or Path(bundle.path) / "spec.yaml")
    tell_controller("start", release.model, release, plan=plan, why=why)
    if follow:
        follow_newest(release.model)


def status(
    model: Annotated[str | None, typer.Argument(help="One model. [default: all]", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Show the state of each model's newest rollout."""
    from serin.rollout.run.status import problems

    found, failed = _statuses(model), problems(environment.home(), model)
    if as_json:
        show_json([asdict(entry) for entry in found])
    else:
        columns = ("model", "live", "rolling out", "phase", "weight", "since", "why")
        empty = "no rollouts yet: `serin rollout start MODEL`"
        show_table(columns, [_row(entry) for entry in found], empty=empty)
    show_problems(failed)


def watch(model: Model) -> None:
    """Follow the model's newest rollout until it has ended: live on a terminal, else line by line. Exit code 0:
    promoted."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        from rich.console import Console

        from serin.commands.rollout_view import watch_live
        from serin.rollout.run.access import find_rollouts

        (now,) = _statuses(model)
        watch_live(find_rollouts(), model, now.rollout.id, Console())
        _end(model, now.rollout.id)
    else:
        follow_newest(model)


def _order(kind: Kind) -> Callable[[str, str], None]:
    """Make the command that sends an order of this kind. A version that is named must be the one that is rolled out."""

    def order(name: ModelVersion, why: Why = "") -> None:
        model, version = split_version(name)
        tell_controller(kind, model, None if version is None else open_store().release(name), why=why)

    order.__doc__ = _ORDERS[kind]
    return order


def rollback(name: ModelVersion, why: Why = "", follow: Follow = True) -> None:
    """Return to an earlier version: at once while it is still warm, else by a new rollout. [default: the one before]"""
    model, version = split_version(name)
    release = None if version is None else open_store().release(name)
    warning = _unwatched(model, release)
    tell_controller("rollback", model, release, why=why)
    if warning:
        say(warning)
    if follow:
        follow_newest(model, returning=True)


def _unwatched(model: str, release: Release | None) -> str:
    """What happens to open drift alerts when the version that returns does not watch drift; empty: nothing."""
    from serin.monitoring.alerts.book import read_alerts
    from serin.store.packages import stored_spec
    from serin.watcher.cluster_state import watch_home

    alerts = []
    with suppress(StoreError):  # who may release need not be allowed to read what the watcher keeps
        found = read_alerts(watch_home(environment.home(), "alerts"), model, resolved=0).open
        alerts = [each for each in found if each.alert.kind == "drift"]
    if release is None and alerts:
        release = _statuses(model)[0].previous_release
    if not alerts or release is None:
        return ""
    bundle = Path(open_store().bundle(model, release.label).path)
    if (bundle / "spec.yaml").is_file() and stored_spec(bundle).monitoring.drift is not None:
        return ""
    return (
        f"version {release.label} is not watched: its spec has no monitoring.drift. "
        f"{counted(len(alerts), 'open drift alert')} will be closed, although the traffic may stay shifted"
    )


def tell_controller(
    kind: Kind, model: str, release: Release | None = None, *, plan: Plan | None = None, why: str = ""
) -> None:
    from serin.host.state import running_stack
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.commands import Command
    from serin.rollout.run.status import status_of

    rollouts = find_rollouts()
    if rollouts.log is not None:  # one machine's
        running_stack(environment.home())  # raises NotUp: nobody would answer
    now = None if kind == "start" else status_of(rollouts, model)
    if kind != "start" and now is None:
        raise NotFound(kind="rollout of", name=model, known=rollouts.models())
    command = Command(
        kind=kind,
        model=model,
        version=release.version if release else None,
        edition=release.edition if release else 1,
        by=environment.actor(),
        why=why,
        plan=plan,
        rollout=now.rollout.id if now and kind in _ORDERS else None,  # another one may begin in the meantime
    )
    answer = rollouts.mailbox.ask(command)
    if not answer.accepted:
        raise CommandRefused(model=model, command=kind, reason=answer.reason)
    show(f"{kind} {model}{f' version {release.label}' if release else ''}: accepted")


def _take_in(model: str, servers: Elsewhere, stable: str, candidate: str) -> Release:
    """Registers both servers and makes the stable one live; returns the candidate's version."""
    from serin.host.state import running_stack
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.status import status_of
    from serin.serving.external import parse_address, same_address

    try:
        first, second = parse_address(stable), parse_address(candidate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    rollouts = find_rollouts()
    if rollouts.log is not None:  # one machine's
        running_stack(environment.home())  # raises NotUp
    now = status_of(rollouts, model)
    if now is None or now.live is None:
        tell_controller("start", model, servers.register(first), why="the server that answers today")
        follow_newest(model)
    elif (live := servers.endpoint(now.live)) is not None and not same_address(live, first):
        raise RolloutRefused(model=model, command="start", reason=f"the stable server is {live.http} now")
    return servers.register(second)


def _plan_of(spec: Path | None) -> Plan | None:
    from serin.rollout.decide.plan import Plan
    from serin.spec.load import load_spec

    if spec is None:
        return None
    wanted = load_spec(spec)
    return Plan.from_spec(wanted.rollout, wanted.serving, wanted.objectives)


def follow_newest(model: str, *, returning: bool = False) -> None:
    """Prints each decision once; raises RolloutFailed when the rollout ended in a rollback that nobody requested."""
    from serin.pipeline.roll_out import follow_decisions

    (now,) = _statuses(model)
    rollout = now.rollout.id
    try:
        follow_decisions(model, rollout, _say)
    except KeyboardInterrupt:
        say(
            f"stopped watching; the rollout continues. `serin rollout watch {model}` shows it, `abort` ends it"
        )
        raise
    _end(model, rollout, returning=returning)


def _say(decision: Decision) -> None:
    say(f"{when(decision.t)}  {decision.phase:<12} {decision.weight:5.1f}%  {decision.reason}")


def _end(model: str, rollout: str, *, returning: bool = False) -> None:
    from serin.pipeline.roll_out import rollout_outcome
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.record import decision2rollout

    decisions = find_rollouts().decisions(model, rollout)
    if decisions[-1].phase == "retired":
        show(f"{model} is retired: no version of it is served")
        return
    if not returning:
        rollout_outcome(decision2rollout(decisions[-1]).candidate, decisions)
    (now,) = _statuses(model)
    show(f"{model}: version {now.live_release.label if now.live_release else None} is live")


def _statuses(model: str | None) -> list[ModelStatus]:
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.status import status_of, statuses

    rollouts = find_rollouts()
    if model is None:
        return statuses(rollouts)
    found = status_of(rollouts, model)
    if found is None:
        raise NotFound(kind="rollout of", name=model, known=rollouts.models())
    return [found]


def _row(entry: ModelStatus) -> tuple[object, ...]:
    rollout = entry.rollout
    phase = f"{rollout.phase}, held: {rollout.hold}" if rollout.hold else rollout.phase
    going = rollout.label if rollout.running else None
    return (
        entry.name,
        entry.live_release.label if entry.live_release else None,
        going,
        phase,
        f"{rollout.weight_percent:g}%",
        when(rollout.since),
        rollout.reason,
    )


def report(
    name: ModelVersion,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write. [default: MODEL-rollout.html]", show_default=False),
    ] = None,
) -> None:
    """Write the report of a rollout as one HTML file: evidence over time, both arms' latencies, every decision.
    [default: the newest rollout]"""
    from serin.reports.rollout_page import story2html
    from serin.rollout.run.story import tell

    path = out or Path(f"{split_version(name)[0]}-rollout.html")
    write_file(path, story2html(tell(_decisions(name))))
    show(str(path))


def replay(
    name: ModelVersion,
    spec: Annotated[
        Path | None, typer.Option(help="Judge as this spec says. [default: as then]", show_default=False)
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(
            "--log",
            help="Other request logs; repeat it for those of several gateways. [default: the gateway's]",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge the stored requests of a rollout again, second by second, perhaps by another spec. Changes
    nothing. [default: the newest rollout]"""
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.replay import replay as judge_again

    rollouts = find_rollouts()
    logs = log or ([rollouts.log] if rollouts.log else [])
    if not logs:
        raise typer.BadParameter(
            "several gateways have the requests: copy gateway/requests.jsonl of each host, and name each with --log"
        )
    decisions = _decisions(name)
    found = judge_again(decisions, logs, _as_in(spec))
    if as_json:
        show_json(_replay_json(found))
        return
    _show_replay(found, decisions)


def _as_in(spec: Path | None) -> Callable[[Plan], Plan]:
    """Returns a function that makes a plan judge as a spec says. Its steps stay: the traffic followed them."""
    other = _plan_of(spec)
    if other is None:
        return lambda plan: plan
    return lambda plan: replace(plan, **{each: getattr(other, each) for each in _JUDGED})


def _decisions(name: str) -> list[Decision]:
    """The last rollout of the version that MODEL[:VERSION] names, or the model's newest. A rollout's id is taken as a
    version, too."""
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.record import decision2rollout
    from serin.rollout.run.status import status_of

    rollouts, (model, rollout) = find_rollouts(), split_version(name)
    now = status_of(rollouts, model)
    if now is None:
        raise NotFound(kind="rollout of", name=model, known=[])
    if rollout is None:
        return rollouts.decisions(model, now.rollout.id)
    by_version = {}  # the last of each
    for decision in (every := rollouts.decisions(model)):
        by_version[decision2rollout(decision).candidate.version] = decision.rollout
    wanted = by_version.get(int(rollout), rollout) if rollout.isdecimal() else rollout
    decisions = [decision for decision in every if decision.rollout == wanted]
    if not decisions:
        known = [str(version) for version in sorted(by_version)]
        raise NotFound(kind=f"rollout of {model!r}:", name=rollout, known=known)
    return decisions


def _show_replay(found: Replay, decisions: list[Decision]) -> None:
    if not found.requests:
        show("the request log has no more requests of this rollout")
        return
    last, failed = found.moments[-1], found.failed
    turned = next((decision for decision in decisions if decision.phase == "aborting"), None)
    show(f"judged again: {found.requests} requests, {len(found.moments)} s")
    show(
        f"then:  {f'rolled back at {when(turned.t)}: {turned.reason}' if turned else f'ended {decisions[-1].phase}'}"
    )
    if failed:
        show(f"now:   rolled back at {when(failed.point.t)}: {failed.reason}")
    else:
        show(f"now:   not rolled back; at the end {last.verdict}: {last.reason}")


def _replay_json(found: Replay) -> dict[str, object]:
    rows = [
        {
            "t": moment.point.t,
            "weight_percent": moment.point.weight_percent,
            "evidence": moment.point.total,
            "guards": dict(moment.point.e_values),
            "verdict": moment.verdict.value,
            "reason": moment.reason,
        }
        for moment in found.moments
    ]
    failed = found.failed
    return {"requests": found.requests, "failed_at": failed.point.t if failed else None, "seconds": rows}


def retire(model: Model, yes: Yes = False, why: Why = "") -> None:
    """Take a model out of service: requests get 404, its servers end. Its versions stay in the store.

    Requests in flight are answered first. `serin rollout start MODEL:VERSION` serves a version again.
    """
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.status import status_of

    rollouts = find_rollouts()
    status = status_of(rollouts, model)
    if status is not None and status.live_release is not None and not status.rollout.running:
        confirm(f"Take {model} (version {status.live_release.label}) out of service?", yes=yes)
    tell_controller("retire", model, why=why)
    while (now := status_of(rollouts, model)) is not None and now.rollout.running:
        time.sleep(_POLL_S)
    assert now is not None, "a journal does not lose its lines"
    if now.rollout.phase == "retired":
        show(f"{model} is retired; `serin rollout start {model}:{now.rollout.label}` serves it again")


def logs(
    model: Model,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Of each part, the last ones.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until interrupted.")] = False,
) -> None:
    """What a model's servers, the controller and the gateway wrote last about it."""
    from serin.stack.model_logs import find_logs, follow_logs, last_lines

    home = environment.home()
    found = find_logs(home, model)
    if not found:
        from serin.rollout.run.status import status

        raise NotFound(kind="log of model", name=model, known=[entry.name for entry in status(home)])
    new_lines = follow_logs(home, model)
    for source in found:
        recent = last_lines(source, lines)
        say(f"==> {source.name} ({source.path})")
        for line in recent:
            show(line)
    if follow:
        for name, line in new_lines:
            show(f"{name}: {line}")
