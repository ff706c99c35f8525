"""The life of one pod of the test kubelet, in a thread: volumes, init containers, containers, status, end."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.cluster.container import Container, Object, Place, decoded, variables_of
from tests.cluster.probes import Probes


class Statuses:
    def __init__(self) -> None:
        self._found: dict[str, Object] = {}

    def note(
        self,
        name: str,
        *,
        ready: bool = False,
        restarts: int = 0,
        code: int | None = None,
        last: int | None = None,
        waiting: str = "",
        reason: str = "",
    ) -> None:
        """`code`: of a container that ended. `last`: of one that ended and is started again. `reason`: why it did."""
        before = self._found.get(name, {})
        state: Object = {"running": {"startedAt": _now()}}
        if waiting:
            state = {"waiting": {"reason": waiting}}
        elif code is not None:
            state = {"terminated": _ended(code, reason)}
        if before.get("state", {}).keys() == state.keys():
            state = before["state"]
        self._found[name] = {
            "name": name,
            "image": "",
            "imageID": "",
            "ready": ready,
            "started": "running" in state,
            "restartCount": restarts,
            "state": state,
            "lastState": (
                before.get("lastState", {}) if last is None else {"terminated": _ended(last, reason)}
            ),
        }

    def of(self, spec: Object, phase: str, *, leaving: bool) -> Object:
        """Returns the parts of a pod's status that follow from its containers."""
        first = [each["name"] for each in spec.get("initContainers", ())]
        others = [each["name"] for each in spec["containers"]]
        ready = not leaving and all(self._found.get(name, {}).get("ready") for name in others)
        conditions = {
            "PodScheduled": True,
            "Initialized": phase != "Pending",
            "ContainersReady": ready,
            "Ready": ready,
        }
        return {
            "phase": phase,
            "conditions": [{"type": kind, "status": str(value)} for kind, value in conditions.items()],
            "initContainerStatuses": [self._found[name] for name in first if name in self._found],
            "containerStatuses": [self._found[name] for name in others if name in self._found],
        }


def _ended(code: int, reason: str) -> Object:
    times = {"startedAt": _now(), "finishedAt": _now()}
    message = {"message": reason} if reason else {}
    return {"exitCode": code, "reason": "Error" if code else "Completed", **message, **times}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


if TYPE_CHECKING:
    from tests.cluster.kubelet import Kubelet

_LOOK_S = 0.1
_BACKOFF_S = (1.0, 2.0, 5.0)
_LONGEST_GRACE_S = 30


class Supervised:
    """A container that is restarted by the pod's policy. `code`: of one that ended for good."""

    def __init__(self, spec: Object, pod: Pod, place: Place) -> None:
        self.code: int | None = None
        self._spec, self._pod, self._place = spec, pod, place
        self._restarts, self._start_at = 0, 0.0
        self._start()

    def _start(self) -> None:
        self._pod.start(self._spec, self._place)
        self._probes = Probes(self._spec, self._pod.address, self._pod.containers[self._spec["name"]])
        self._waits = False

    def look(self) -> None:
        name = self._spec["name"]
        if self.code is not None or (self._waits and time.monotonic() < self._start_at):
            return
        if self._waits:
            self._restarts += 1
            self._start()
            self._pod.statuses.note(name, restarts=self._restarts)
            return
        container = self._pod.containers[name]
        if container.exit_code() is None and self._probes.dead():
            container.stop(5.0)
        code = container.exit_code()
        if code is None:
            self._pod.statuses.note(name, ready=self._probes.ready(), restarts=self._restarts)
        elif self._pod.restarts(code):
            waiting = "CrashLoopBackOff" if self._restarts else "ContainerRestarting"
            reason = container.reason()
            self._pod.statuses.note(name, restarts=self._restarts, last=code, waiting=waiting, reason=reason)
            self._waits = True
            self._start_at = time.monotonic() + _BACKOFF_S[min(self._restarts, 2)]
        else:
            self.code = code
            reason = container.reason()
            self._pod.statuses.note(name, restarts=self._restarts, code=code, reason=reason)


class Pod:
    def __init__(self, kubelet: Kubelet, found: Object) -> None:
        self.spec, self.metadata = found["spec"], found["metadata"]
        self.namespace, self.name = self.metadata["namespace"], self.metadata["name"]
        self.labels: dict[str, str] = self.metadata.get("labels", {})
        self.containers: dict[str, Container] = {}
        self.space = self.address = ""
        self.ended = False
        self.statuses = Statuses()
        self._kubelet, self._found = kubelet, found
        self._leave, self._kill = threading.Event(), threading.Event()
        self._reported: Object = {}
        self._mounts: list[Path] = []
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def log(self, container: str) -> Path:
        return self._kubelet.folder / "logs" / f"{self.namespace}.{self.name}.{container}.log"

    def leave(self) -> None:
        """Ends it gracefully: it was deleted."""
        self._leave.set()

    def kill(self) -> None:
        """Ends everything at once, without a report."""
        self._kill.set()

    def join(self) -> None:
        self._thread.join(60)

    def start(self, spec: Object, place: Place) -> None:
        plane = self._kubelet.plane
        variables = variables_of(spec, self._found, self.address, self._read)
        variables |= {"KUBERNETES_SERVICE_HOST": plane.address, "KUBERNETES_SERVICE_PORT": str(plane.port)}
        self.containers[spec["name"]] = Container(spec, self._found, place, variables, self.log(spec["name"]))
        self.statuses.note(spec["name"])

    def restarts(self, code: int) -> bool:
        policy = self.spec.get("restartPolicy", "Always")
        return policy == "Always" or (policy == "OnFailure" and code != 0)

    def _live(self) -> None:
        folder = self._kubelet.folder / "pods" / self.metadata["uid"]
        (self._kubelet.folder / "logs").mkdir(parents=True, exist_ok=True)
        phase = "Failed"
        try:
            self.space, self.address = self._kubelet.network.add()
            self._kubelet.guard(self)
            place = Place(
                space=self.space,
                address=self.address,
                hostname=self.name[:63],
                folder=folder,
                volumes=self._volumes(folder),
                resolver=self._kubelet.network.gateway,
            )
            self._report("Pending")
            phase = self._run(place)
        except (AssertionError, OSError, httpx.HTTPError, KeyError) as error:
            self._kubelet.errors.append(f"{self.namespace}/{self.name}: {type(error).__name__}: {error}")
        finally:
            for container in self.containers.values():
                container.kill()
            self.ended = True
            if not self._kill.is_set():
                self._finish(phase)
            self._kubelet.network.remove(self.space)
            for path in self._mounts:
                subprocess.run(["umount", "--lazy", str(path)], check=False)
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, place: Place) -> str:
        """Returns the phase in which it ended."""
        for spec in self.spec.get("initContainers", ()):
            if not self._run_init(spec, place):
                return "Failed"
        self._kubelet.prepared(self, place.volumes)
        running = [Supervised(spec, self, place) for spec in self.spec["containers"]]
        while not self._leave.is_set() and not self._kill.is_set():
            for each in running:
                each.look()
            codes = [each.code for each in running]
            if all(code is not None for code in codes):
                return "Failed" if any(codes) else "Succeeded"
            self._report("Running")
            time.sleep(_LOOK_S)
        if self._leave.is_set():
            self._report("Running", leaving=True)
            grace_s = min(self.spec.get("terminationGracePeriodSeconds", 30), _LONGEST_GRACE_S)
            self._run_hooks(grace_s)
            for container in self.containers.values():
                container.stop(grace_s)
        return "Failed"

    def _run_hooks(self, grace_s: float) -> None:
        """Runs the commands that containers have before they are told to end."""
        for spec in self.spec["containers"]:
            hook = spec.get("lifecycle", {}).get("preStop", {}).get("exec")
            if hook is not None and not self._kill.is_set():
                self.containers[spec["name"]].run(hook["command"], grace_s)

    def _run_init(self, spec: Object, place: Place) -> bool:
        attempt = 0
        while True:
            self.start(spec, place)
            container = self.containers.pop(spec["name"])
            while (code := container.exit_code()) is None:
                if self._leave.is_set() or self._kill.is_set():
                    container.kill()
                    return False
                time.sleep(_LOOK_S)
            self.statuses.note(spec["name"], ready=code == 0, restarts=attempt, code=code)
            self._report("Pending")
            if code == 0 or not self.restarts(code):
                return code == 0
            self._leave.wait(_BACKOFF_S[min(attempt, 2)])
            attempt += 1

    def _volumes(self, folder: Path) -> dict[str, Path]:
        found = {}
        context = self.spec.get("securityContext", {})
        group = context.get("fsGroup", context.get("runAsGroup", 0))
        for volume in self.spec.get("volumes", ()):
            path = folder / "volumes" / volume["name"]
            if "persistentVolumeClaim" in volume:
                path = self._claimed(volume["persistentVolumeClaim"]["claimName"])
            elif "hostPath" in volume:
                path = Path(volume["hostPath"]["path"])
            else:
                self._fill(volume, path, group)
            found[volume["name"]] = path
        return found

    def _fill(self, volume: Object, path: Path, group: int) -> None:
        path.mkdir(parents=True)
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = f"size={volume['emptyDir']['sizeLimit'].removesuffix('i')}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)], check=True)
            self._mounts.append(path)
        for kind, key, name in (("configmaps", "configMap", "name"), ("secrets", "secret", "secretName")):
            if key not in volume:
                continue
            given, optional = volume[key][name], volume[key].get("optional", False)
            for file, text in self._read(kind, self.namespace, given, optional).items():
                (path / file).write_text(text)
                os.chown(path / file, 0, group)
                (path / file).chmod(0o640)
        os.chown(path, 0, group)
        path.chmod(0o2777 if "emptyDir" in volume else 0o2755)

    def _claimed(self, claim: str) -> Path:
        plane = self._kubelet.plane
        bound = plane.call("GET", f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/{claim}")
        volume = plane.call("GET", f"/api/v1/persistentvolumes/{bound['spec']['volumeName']}")
        return Path(volume["spec"]["hostPath"]["path"])

    def _read(self, kind: str, namespace: str, name: str, optional: bool = False) -> dict[str, str]:
        with self._kubelet.plane.client() as api:
            answer = api.get(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
        if answer.status_code == 404 and optional:
            return {}
        assert answer.status_code == 200, f"no {kind} {name}"
        return decoded(kind, answer.json())

    def _report(self, phase: str, *, leaving: bool = False) -> None:
        status = {
            "hostIP": self._kubelet.network.gateway,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self.metadata["creationTimestamp"],
            **self.statuses.of(self.spec, phase, leaving=leaving),
        }
        if status == self._reported:
            return
        self._reported = status
        with self._kubelet.plane.client() as api:
            api.patch(
                f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/status",
                json={"status": status},
                headers={"Content-Type": "application/merge-patch+json"},
            )

    def _finish(self, phase: str) -> None:
        """Reports the end, and removes the pod from the API once it is deleted."""
        if not self._leave.is_set():
            self._report(phase)
            while not self._leave.wait(0.2) and not self._kill.is_set():
                pass
        if self._leave.is_set():
            options: dict[str, Any] = {
                "gracePeriodSeconds": 0,
                "preconditions": {"uid": self.metadata["uid"]},
            }
            with self._kubelet.plane.client() as api:
                api.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{self.name}", json=options)
