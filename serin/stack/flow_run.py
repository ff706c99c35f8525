"""Run a pipeline on the stack's workers, by Prefect's own command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from serin import environment
from serin.errors import PipelineFailed
from serin.stack.processes import prefect_environment
from serin.stack.state import running_stack
from serin.stack.survivors import STACK_MARK

Say = Callable[[str], None]


def run_pipeline(
    home: Path, spec: Path, *, placed: bool, fresh: Sequence[str], serve: bool, follow: bool, say: Say
) -> None:
    """The run has completed when this returns, if it was followed; else it was accepted. PipelineFailed otherwise."""
    stack = running_stack(home)
    deployment = f"pipeline/{'placed' if placed else 'inline'}"
    parameters = {"spec": str(spec), "fresh": list(fresh), "serve": serve}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deployment", "run", deployment]
    for name, value in parameters.items():
        command += ["--param", f"{name}={json.dumps(value)}"]
    if follow:
        command.append("--watch")
    say(f"{deployment} on {stack.prefect_ui_url}")
    settings = prefect_environment(home, stack.prefect_api_url, own=stack.prefect_port is not None)
    settings.pop(STACK_MARK, None)  # ours to end, not the stack's
    watching = subprocess.Popen(
        command, env=settings, cwd=environment.application_folder(), stdin=subprocess.DEVNULL
    )
    try:
        code = watching.wait()
    except KeyboardInterrupt:
        watching.wait()
        say("no longer watching; the run itself goes on: `serin runs list` shows it")
        raise
    if code != 0:
        raise PipelineFailed(spec=str(spec), url=stack.prefect_ui_url)
