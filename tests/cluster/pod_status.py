"""What the test kubelet reports of a pod's containers."""

import time

from tests.cluster.container import Object


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
    ) -> None:
        """`code`: of a container that ended. `last`: of one that ended and is started again."""
        before = self._found.get(name, {})
        state: Object = {"running": {"startedAt": _now()}}
        if waiting:
            state = {"waiting": {"reason": waiting}}
        elif code is not None:
            state = {"terminated": _ended(code)}
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
            "lastState": before.get("lastState", {}) if last is None else {"terminated": _ended(last)},
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


def _ended(code: int) -> Object:
    times = {"startedAt": _now(), "finishedAt": _now()}
    return {"exitCode": code, "reason": "Error" if code else "Completed", **times}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
