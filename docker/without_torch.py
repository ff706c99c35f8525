"""Prints what Serin needs for serving, one requirement a line: `python3 without_torch.py pyproject.toml EXTRA ...`.

Serving never imports torch, which is the largest package that Serin depends on.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = [line for extra in sys.argv[2:] for line in project["optional-dependencies"][extra]]
print(*(line for line in [*project["dependencies"], *extras] if not line.startswith("torch")), sep="\n")
