"""Probes of the test kubelet: by HTTP, by TCP, or a command in the container, which may take its time."""

import http.client
import socket
import ssl
import threading
import time

from tests.cluster.container import Container, Object

_LEAST_S = 5  # this machine has two cores for a whole cluster


class Command(threading.Thread):
    """A probe's command, beside the life of its pod. It ends with the container."""

    def __init__(self, container: Container, command: list[str], limit_s: float) -> None:
        super().__init__(daemon=True)
        self.succeeded = False
        self._container, self._words, self._limit_s = container, command, limit_s
        self.start()

    def run(self) -> None:
        self.succeeded = self._container.run(self._words, self._limit_s)


class Probes:
    """A container without a startup probe is started; without a readiness probe it is ready when it is started."""

    def __init__(self, spec: Object, address: str, container: Container) -> None:
        self._spec, self._address, self._container = spec, address, container
        self._started = "startupProbe" not in spec
        self._asked_at, self._ready, self._missed, self._failures = float("-inf"), False, 0, 0
        self._failed = False  # to start
        self._command: Command | None = None  # that runs
        self._live_at = time.monotonic() + spec.get("livenessProbe", {}).get("initialDelaySeconds", 0)

    def ready(self) -> bool:
        kind = "readinessProbe" if self._started else "startupProbe"
        probe = self._spec.get(kind)
        if probe is None:
            return self._started
        if not self._container.has_started():
            return False
        if self._command is None and time.monotonic() - self._asked_at < min(
            probe.get("periodSeconds", 10), 2
        ):
            return self._ready
        answered = self._ask(probe)
        if answered is None:
            return self._ready
        self._asked_at = time.monotonic()
        self._missed = 0 if answered else self._missed + 1
        if answered or self._missed >= probe.get("failureThreshold", 3):
            self._ready = answered and self._started
            self._failed = not (answered or self._started)
        self._started = self._started or answered
        return self._ready

    def dead(self) -> bool:
        probe = self._spec.get("livenessProbe")
        if probe is None or not self._started or time.monotonic() < self._live_at:
            return self._failed
        self._live_at = time.monotonic() + probe.get("periodSeconds", 10)
        self._failures = 0 if self._answers(probe) else self._failures + 1
        return self._failures >= probe.get("failureThreshold", 3)

    def _ask(self, probe: Object) -> bool | None:
        """None while a command runs."""
        if "exec" not in probe:
            return self._answers(probe)
        if self._command is None:
            limit_s = max(probe.get("timeoutSeconds", 1), _LEAST_S)
            self._command = Command(self._container, probe["exec"]["command"], limit_s)
        if self._command.is_alive():
            return None
        succeeded, self._command = self._command.succeeded, None
        return succeeded

    def _answers(self, probe: Object) -> bool:
        timeout = max(probe.get("timeoutSeconds", 1), _LEAST_S)
        if "exec" in probe:
            return self._container.run(probe["exec"]["command"], timeout)
        where = probe.get("httpGet") or probe["tcpSocket"]
        ports = {each["name"]: each["containerPort"] for each in self._spec.get("ports", ())}
        port = ports.get(where["port"], where["port"])
        try:
            if "httpGet" not in probe:
                socket.create_connection((self._address, port), timeout).close()
                return True
            secure = where.get("scheme") == "HTTPS"  # as kubelet, which checks no certificate
            connection = (
                http.client.HTTPSConnection(self._address, port, timeout=timeout, context=_unchecked())
                if secure
                else http.client.HTTPConnection(self._address, port, timeout=timeout)
            )
            connection.request("GET", where["path"])
            status = connection.getresponse().status
            connection.close()
            return 200 <= status < 400
        except (OSError, http.client.HTTPException):
            return False


def _unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
