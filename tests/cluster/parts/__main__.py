"""Installs every part and prints what is there and what is missing: `python -m tests.cluster.parts`."""

import importlib
import pkgutil
import time

from tests.cluster import parts
from tests.cluster.part import Missing

for module in sorted(pkgutil.iter_modules(parts.__path__), key=lambda found: found.name):
    if module.name == "__main__":
        continue
    began = time.monotonic()
    try:
        importlib.import_module(f"tests.cluster.parts.{module.name}").install()
    except Missing as error:
        print(f"  missing  {module.name}: {error}", flush=True)
    else:
        print(f"  ready    {module.name} ({time.monotonic() - began:.1f} s)", flush=True)
