"""`python -m tests.cluster [ARGUMENTS]`: makes what the tests of this folder need, then runs them with pytest in
namespaces of their own (isolated.py). `make cluster-test` calls it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.isolated import run_isolated, temporary_folder
from tests.cluster.part import prepare


def main(arguments: list[str]) -> int:
    prepare()
    named = [
        each for each in arguments if not each.startswith("-") and Path(each.partition("::")[0]).exists()
    ]
    command = [sys.executable, "-m", "pytest", *([] if named else ["tests/cluster"]), *arguments]
    if os.geteuid() != 0:
        print("not root: what needs namespaces is skipped", flush=True)
        return subprocess.run(command, check=False).returncode
    with temporary_folder() as folder:
        return run_isolated(command, {**os.environ, "TMPDIR": str(folder)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
