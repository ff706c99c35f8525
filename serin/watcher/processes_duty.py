"""The duty that reports frozen processes: those that the supervisor has replaced, and the supervisor itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from serin.errors import NameInvalid
from serin.host.state import Stack, read_stack
from serin.host.watchdog import REPORTED_S, SILENT_S, is_stopped, read_replaced, silent_for_s
from serin.monitoring.alerts.alert import Alert, Alerts, Severity
from serin.monitoring.alerts.read import read_alerts
from serin.store.artifacts import Release
from serin.watcher.duty import Duty

_SUPERVISOR = "supervisor"


class ProcessesDuty(Duty):
    """It keeps no state: the supervisor's record and the book know what is open."""

    name, every_s = "processes", 2.0

    def __init__(self, home: Path, alerts: Alerts) -> None:
        self._home, self._alerts = home, alerts

    def tick(self, now: float) -> None:
        found = {alert.key: alert for alert in (*self._replaced(now), *self._supervisor(now))}
        for alert in found.values():
            self._alerts.fire(alert, now)
        for record in read_alerts(self._home, resolved=0).open:
            if record.alert.kind == "process" and record.alert.key not in found:
                self._alerts.resolve(record.alert.key, now)

    def _replaced(self, now: float) -> Iterator[Alert]:
        """Yields one alert for each process that was replaced in the last minutes."""
        recent = [each for each in read_replaced(self._home) if now - each.t < REPORTED_S]
        for name in sorted({each.name for each in recent}):
            times = [each for each in recent if each.name == name]
            yield _alert(
                name,
                severity="ticket",
                title=f"{name} was frozen and was replaced",
                text=f"Process {times[-1].pid}: {times[-1].reason}. Replaced {len(times)} times within "
                f"{REPORTED_S / 60:.0f} minutes. `serin status` and the log of the process show how it is now.",
                since=times[0].t,
            )

    def _supervisor(self, now: float) -> Iterator[Alert]:
        stack = read_stack(self._home)
        if stack is None or not stack.is_alive or not _is_frozen(stack):
            return
        pid = stack.supervisor_pid
        yield _alert(
            _SUPERVISOR,
            severity="page",
            title="the supervisor is frozen",
            text=f"Process {pid} is stopped or hangs. Models are served, but no process that ends is started again. "
            f"`kill -CONT {pid}` lets it continue; `serin down` and `serin up` replace it.",
            since=now,
        )


def _is_frozen(stack: Stack) -> bool:
    pid = stack.supervisor_pid
    return is_stopped(pid) or silent_for_s(stack.home, pid) > 5 * SILENT_S


def _alert(name: str, *, severity: Severity, title: str, text: str, since: float) -> Alert:
    try:
        model, release = Release.parse(name).model, name
    except NameInvalid:
        model, release = "", ""
    return Alert(
        key=f"{model or 'stack'}/process/{name}",
        kind="process",
        model=model,
        release=release,
        severity=severity,
        title=title,
        text=text,
        since=since,
    )
