"""A container of the test kubelet: a process in its own namespaces, with the machine's files as its image.

It has the pod's network, its own process ids, host name and root: an overlay of the machine's, read-only where the
container asks for that, with the pod's volumes bound into it. It runs as the user that the pod names.
"""

import base64
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
ROOT = Path(__file__).resolve().parents[2]
# What the images have: Serin's environment and Triton's.
IMAGE = {"/opt/serin": Path(sys.prefix), "/opt/serin-triton": Path(f"{sys.prefix}-triton")}
IMAGE_VARIABLES = {"PATH": "/opt/serin/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}


@dataclass(kw_only=True)
class Place:
    """Where the containers of a pod run. `volumes`: name -> folder of this machine."""

    space: str
    address: str
    hostname: str
    folder: Path
    volumes: Mapping[str, Path]
    resolver: str


class Container:
    def __init__(
        self, spec: Object, pod: Object, place: Place, variables: Mapping[str, str], log: Path
    ) -> None:
        self.name = spec["name"]
        self.log = log
        self._began = time.time()
        self._user = _user(spec, pod)
        self._variables = {
            **IMAGE_VARIABLES,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **variables,
        }
        root = place.folder / f"{self.name}-{time.monotonic_ns()}"
        self._reason = root / "reason"
        script = _script(spec, pod, place, self._variables, root)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", place.space, "unshare", "--mount", "--uts", "--pid", "--fork", "bash", "-c",
                 script],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def exit_code(self) -> int | None:
        """None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def reason(self) -> str:
        """What it has left in /dev/termination-log."""
        return self._reason.read_text() if self._reason.exists() else ""

    def has_started(self) -> bool:
        """Returns whether it sees its own files: until then, its first process is still the one that mounts them."""
        try:
            (first,) = self._children()
            return str(Path(f"/proc/{first}/root").readlink()) != "/"
        except (OSError, ValueError):
            return False

    def _children(self) -> list[str]:
        return Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the container's first process."""
        try:
            for child in self._children():
                os.kill(int(child), number)
        except (FileNotFoundError, ProcessLookupError):
            pass

    def run(self, command: Sequence[str], within_s: float) -> bool:
        """Runs a command in the container, as its user; returns whether it succeeded."""
        try:
            (first,) = self._children()
            into = ["nsenter", "--target", first, "--mount", "--uts", "--net", "--pid", "--root", "--wd=/"]
            user, group = (str(each) for each in self._user)
            done = subprocess.run(
                [*into, "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", *command],
                capture_output=True, timeout=within_s, check=False, env=self._variables,
            )  # fmt: skip
            return done.returncode == 0
        except (OSError, ValueError, subprocess.TimeoutExpired):  # it has ended, or does not answer
            return False

    def stop(self, grace_s: float) -> None:
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends it with all of its processes: the kernel ends a namespace whose first process is gone."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()  # one that was stopped with its child
        self._process.wait()


def variables_of(spec: Object, pod: Object, address: str, read: Any) -> dict[str, str]:
    """Returns the environment of a container. `read(kind, namespace, name)`: the data of a ConfigMap or Secret."""
    space = pod["metadata"]["namespace"]
    found: dict[str, str] = {}
    for source in spec.get("envFrom", ()):
        for kind, key in (("configmaps", "configMapRef"), ("secrets", "secretRef")):
            if key in source:
                found |= read(kind, space, source[key]["name"], source[key].get("optional", False))
    fields = {"metadata.name": pod["metadata"]["name"], "metadata.namespace": space, "status.podIP": address}
    for variable in spec.get("env", ()):
        given = variable.get("valueFrom", {})
        if "fieldRef" in given:
            found[variable["name"]] = fields[given["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in given or "configMapKeyRef" in given:
            kind, key = (
                ("secrets", "secretKeyRef") if "secretKeyRef" in given else ("configmaps", "configMapKeyRef")
            )
            found[variable["name"]] = read(kind, space, given[key]["name"], False)[given[key]["key"]]
        else:
            found[variable["name"]] = _expanded(variable.get("value", ""), found)
    return found


def decoded(kind: str, found: Object) -> dict[str, str]:
    data = found.get("data") or {}
    return {
        key: base64.b64decode(value).decode() if kind == "secrets" else value for key, value in data.items()
    }


def _hidden(targets: Iterable[str]) -> list[Path]:
    """What a container runs and would not see: because a volume covers it, or it is on another file system than /."""
    needed = (ROOT, Path(sys.prefix), Path(f"{sys.prefix}-triton"), Path(sys.base_prefix))
    covers = [Path(target) for target in targets if target not in IMAGE]
    return [
        path
        for path in needed
        if any(path.is_relative_to(cover) for cover in covers)
        or path.stat().st_dev != Path("/").stat().st_dev
    ]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text


def _context(spec: Object, pod: Object) -> Object:
    return {**pod["spec"].get("securityContext", {}), **spec.get("securityContext", {})}


def _user(spec: Object, pod: Object) -> tuple[int, int]:
    context = _context(spec, pod)
    return context.get("runAsUser", 0), context.get("runAsGroup", 0)


def _script(spec: Object, pod: Object, place: Place, given: Mapping[str, str], root: Path) -> str:
    context = _context(spec, pod)
    user, group = _user(spec, pod)
    if context.get("runAsNonRoot"):
        assert user > 0, f"{spec['name']} would run as root"
    tree = root / "tree"
    command = [_expanded(word, given) for word in (*spec.get("command", ()), *spec.get("args", ()))]
    domains = f"{pod['metadata']['namespace']}.svc.cluster.local svc.cluster.local cluster.local"
    names = f"nameserver {place.resolver}\\nsearch {domains}\\noptions ndots:5\\n"
    lines = [
        "set -e", "mount --make-rprivate /", f"mkdir -p {root}/up/etc {root}/work {tree}",
        f"printf {shlex.quote(names)} > {root}/up/etc/resolv.conf",
        f"printf '127.0.0.1 localhost\\n%s %s\\n' {place.address} {place.hostname} > {root}/up/etc/hosts",
        f"mount -t overlay overlay -o lowerdir=/,upperdir={root}/up,workdir={root}/work {tree}",
        f"mount -t proc proc {tree}/proc", f"mount --rbind /sys {tree}/sys",
        f"mount -t tmpfs -o mode=755 tmpfs {tree}/dev", f"mkdir {tree}/dev/shm", f"ln -s /proc/self/fd {tree}/dev/fd",
        *(f"touch {tree}/dev/{name} && mount --bind /dev/{name} {tree}/dev/{name}" for name in _DEVICES),
        # Kubernetes reads it when the container ends.
        f"touch {root}/reason {tree}/dev/termination-log", f"chmod 666 {root}/reason",
        f"mount --bind {root}/reason {tree}/dev/termination-log",
        f"mount -t tmpfs -o mode=1777 tmpfs {tree}/dev/shm",  # pods share no memory
    ]  # fmt: skip
    # The interpreter may be in a home folder that only its owner enters.
    private = [path for path in Path(sys.base_prefix).parents if not path.stat().st_mode & 0o001]
    lines += [f"chmod o+x {tree}{path}" for path in private]
    binds = {**{target: (source, False) for target, source in IMAGE.items()}}
    for mount in spec.get("volumeMounts", ()):
        binds[mount["mountPath"]] = (
            place.volumes[mount["name"]] / mount.get("subPath", ""),
            mount.get("readOnly", False),
        )
    binds |= {str(path): (path, True) for path in _hidden(binds)}  # sorted below: after what hides it
    for target, (source, read_only) in sorted(binds.items()):
        lines.append(
            f"at=$(chroot {tree} realpath -m {target}); mkdir -p {tree}$at; mount --bind {source} {tree}$at"
        )
        if read_only:
            lines.append(f"mount -o remount,bind,ro {tree}$at")
    if context.get("readOnlyRootFilesystem"):
        lines.append(f"mount -o remount,ro {tree}")
    words = " ".join(shlex.quote(word) for word in (*(f"{k}={v}" for k, v in given.items()), *command))
    folder = spec.get("workingDir", "/")
    lines += [
        f"hostname {place.hostname}",
        f"exec chroot --userspec={user}:{group} {tree} /usr/bin/env -i --chdir={folder} {words}",
    ]
    return "\n".join(lines)
