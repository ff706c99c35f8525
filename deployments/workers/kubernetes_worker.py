"""Prefect's worker type `serin-kubernetes`: `prefect worker start --type serin-kubernetes --pool cpu`.

Prefect's own Kubernetes worker, but for two fields of a Job that its template must have at a place where Kubernetes
does not know them: an API server that validates strictly refuses such a Job. And a Job knows its image, which a spec
may ask for (`environment.image`).
"""

from __future__ import annotations

from typing import Any

from prefect_kubernetes.worker import KubernetesWorker, KubernetesWorkerJobConfiguration

from serin.prefect.processes import KUBERNETES_TYPE

_UNKNOWN = ("completions", "parallelism")


class StageJob(KubernetesWorkerJobConfiguration):  # type: ignore[misc]
    """The Job of a run, as Kubernetes knows it."""

    def prepare_for_flow_run(self, *arguments: Any, **settings: Any) -> None:
        super().prepare_for_flow_run(*arguments, **settings)
        job = self.job_manifest["spec"]
        for name in _UNKNOWN:
            job[name] = job["template"]["spec"].pop(name)
        container = job["template"]["spec"]["containers"][0]
        container["env"].append({"name": "SERIN_IMAGE", "value": container["image"]})


class KubernetesStageWorker(KubernetesWorker):  # type: ignore[misc]
    """Runs each flow run as a Job that passes strict validation."""

    type = KUBERNETES_TYPE
    job_configuration = StageJob
    _description = "Execute flow runs as Kubernetes Jobs that pass strict validation."
