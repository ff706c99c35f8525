"""An aggregated API server for `custom.metrics.k8s.io`, as prometheus-adapter is one: metrics of Services."""

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from serin.cluster.kubernetes.autoscaler import IN_FLIGHT, PER_SECOND
from tests.cluster.kubernetes import ControlPlane
from tests.kit.threads import beside
from tests.kit.waiting import running, until

Measure = Callable[[str, str], float]  # a metric of a release

_GROUP, _VERSION = "custom.metrics.k8s.io", "v1beta1"
_ROOT = f"/apis/{_GROUP}/{_VERSION}"
_SERVICE, _SPACE = "custom-metrics", "kube-system"


@contextmanager
def custom_metrics(plane: ControlPlane, measure: Measure) -> Iterator[None]:
    """Registers the server with the API server until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = _answer(self.path.partition("?")[0], measure)
            body = json.dumps(found or {"kind": "Status", "status": "Failure", "code": 404}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(plane.folder / "tls.crt", plane.folder / "tls.key")
    context.load_verify_locations(plane.folder / "front.crt")
    context.verify_mode = ssl.CERT_REQUIRED  # nobody but the API server
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with beside(server.serve_forever, stop=_Shutdown(server)):
        port = server.server_address[1]
        plane.call("POST", f"/api/v1/namespaces/{_SPACE}/services", _service(port))
        plane.call("POST", "/apis/apiregistration.k8s.io/v1/apiservices", _registration(port))
        alive = running(*plane.processes.values())
        until(lambda: _available(plane), "the metrics' API", within_s=120, every_s=0.2, alive=alive)
        yield


class _Shutdown(threading.Event):
    def __init__(self, server: ThreadingHTTPServer) -> None:
        super().__init__()
        self._server = server

    def set(self) -> None:
        super().set()
        self._server.shutdown()
        self._server.server_close()


def _service(port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _SERVICE, "namespace": _SPACE},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
    }


def _registration(port: int) -> dict[str, Any]:
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{_VERSION}.{_GROUP}"},
        "spec": {
            "group": _GROUP,
            "version": _VERSION,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": _SERVICE, "namespace": _SPACE, "port": port},
        },
    }


def _available(plane: ControlPlane) -> bool:
    found = plane.call("GET", f"/apis/apiregistration.k8s.io/v1/apiservices/{_VERSION}.{_GROUP}")
    conditions = {each["type"]: each["status"] for each in found.get("status", {}).get("conditions", ())}
    return conditions.get("Available") == "True"


def _answer(path: str, measure: Measure) -> dict[str, Any] | None:
    api = f"{_GROUP}/{_VERSION}"
    if path == _ROOT:
        resources = [
            {"name": f"services/{name}", "namespaced": True, "kind": "MetricValueList", "verbs": ["get"]}
            for name in (IN_FLIGHT, PER_SECOND)
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources}
    parts = path.removeprefix(f"{_ROOT}/").split("/")
    if len(parts) != 5 or (parts[0], parts[2]) != ("namespaces", "services"):
        return None
    _, space, _, service, metric = parts
    item = {
        "describedObject": {"kind": "Service", "namespace": space, "name": service, "apiVersion": "v1"},
        "metricName": metric,
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "value": f"{round(measure(metric, service) * 1000)}m",
    }
    return {"kind": "MetricValueList", "apiVersion": api, "metadata": {}, "items": [item]}
