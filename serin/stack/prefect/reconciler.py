"""The reconciler's process: `python -m serin.stack.prefect.reconciler`. Checks every few seconds that each run has one.

It needs no clean exit: supervisord restarts it after a crash, and it only forgets since when a process is missing. It
waits for a Prefect server that does not answer.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

from serin.errors import SerinError, StackError
from serin.machine import environment
from serin.machine.heartbeat import beat
from serin.stack.host.standing import begin_beats, log_to_stdout, stop_on_signals
from serin.stack.host.state import Stack, read_stack
from serin.stack.prefect.reconcile import build_reconciler

log = logging.getLogger("serin.stack.prefect.reconciler")  # not __name__, which is __main__ here

LOOK_S = 5.0
_WAITS_S = 60.0  # for a Prefect server that is busy


def run(stack: Stack, stop: threading.Event) -> None:
    """Checks until `stop` is set."""
    reconciler = build_reconciler(stack)
    log.info("the reconciler has started")
    silent = False
    while not stop.is_set():
        beat()
        try:
            for line in reconciler.look():
                log.info(line)
            silent = False
        except (OSError, StackError) as error:
            if not silent:  # once is enough for a server that is being restarted
                log.warning("this check failed and will be repeated: %s", error)
            silent = True
        beat(within_s=LOOK_S)
        stop.wait(LOOK_S)
    log.info("the reconciler has stopped")


def main() -> None:
    log_to_stdout()
    stop = stop_on_signals()
    home: Path = environment.home()
    begin_beats(home, waits_s=_WAITS_S)
    stack = read_stack(home)
    if stack is None:
        sys.exit(f"no stack was ever started in {home}")
    try:
        run(stack, stop)
    except SerinError as error:
        sys.exit(f"the reconciler cannot continue: {error}")


if __name__ == "__main__":
    main()
