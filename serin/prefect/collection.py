"""Registers Serin's worker types with Prefect through the entry point group `prefect.collections`.

The workers are in the application folder (the checkout, or serin/app of an installed wheel). They are loaded under a
private name: Prefect imports this module in other projects' processes too, and must not hide their own `deployments`
package.
"""

from __future__ import annotations

import importlib.util
import sys

from serin.machine.environment import application_folder

_PACKAGE = "serin_workers"


def _load_workers() -> None:
    folder = application_folder() / "deployments" / "workers"
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    modules = ["worker", "slurm.worker"]
    if importlib.util.find_spec("prefect_kubernetes") is not None:  # it is in an extra
        modules.append("kubernetes_worker")
    for module in modules:
        importlib.import_module(f"{_PACKAGE}.{module}")


_load_workers()
