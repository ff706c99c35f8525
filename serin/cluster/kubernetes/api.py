"""The part of Kubernetes' API that releases need, with plain objects and Serin's errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from serin.errors import ExtraMissing, KubernetesGone, KubernetesRefused

try:
    import urllib3.exceptions
    from kubernetes import client, config
except ModuleNotFoundError as error:
    raise ExtraMissing(package="kubernetes", extra="kubernetes") from error

Object = dict[str, Any]
Resource = Literal["deployments", "services", "pods"]

FIELD_MANAGER: Final = "serin-controller"
NOT_FOUND, CONFLICT = 404, 409

_GROUP: Final[Mapping[Resource, str]] = {
    "deployments": "/apis/apps/v1",
    "services": "/api/v1",
    "pods": "/api/v1",
}
_TIMEOUT_S: Final = 10.0
_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"


class Namespace:
    """Objects of one namespace."""

    def __init__(self, name: str, *, settings: client.Configuration | None = None) -> None:
        """`settings`: of the cluster; None: the pod's own service account, or what KUBECONFIG names."""
        self.name = name
        if settings is None:
            settings = client.Configuration()
            try:
                config.load_config(client_configuration=settings)
            except config.ConfigException as error:
                raise KubernetesGone(
                    url="(none)", reason=f"no cluster is configured here: {error}"
                ) from error
        self._settings = settings
        self._client = client.ApiClient(settings)

    def get(self, resource: Resource, name: str) -> Object | None:
        try:
            return self._call("GET", self._path(resource, name))
        except KubernetesRefused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def list(self, resource: Resource, selector: str) -> list[Object]:
        items = self._call("GET", self._path(resource), labelSelector=selector).get("items", [])
        return list(items)

    def apply(self, resource: Resource, wanted: Object) -> Object:
        """Creates the object, or changes the fields that Serin sets. Repeating it changes nothing."""
        return self._call(
            "PATCH",
            self._path(resource, wanted["metadata"]["name"]),
            body=wanted,
            kind=_APPLY,
            fieldManager=FIELD_MANAGER,
            force="true",
        )

    def merge(self, resource: Resource, name: str, change: Object) -> Object:
        """Changes some fields. With metadata.resourceVersion in `change` it raises KubernetesRefused with status 409
        when somebody changed the object since it was read."""
        path = self._path(resource, name)
        return self._call("PATCH", path, body=change, kind=_MERGE, fieldManager=FIELD_MANAGER)

    def delete(self, resource: Resource, name: str, *, uid: str) -> None:
        """Deletes this very object with all that depends on it; one that is gone or was replaced is left alone."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": uid},
        }
        try:
            self._call("DELETE", self._path(resource, name), body=body)
        except KubernetesRefused as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise

    def _path(self, resource: Resource, name: str = "") -> str:
        return f"{_GROUP[resource]}/namespaces/{self.name}/{resource}" + (f"/{name}" if name else "")

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        kind: str = "application/json",
        **query: str,
    ) -> Object:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = kind
        call = self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._client.call_api(*call, _request_timeout=_TIMEOUT_S)
            content = answer.read()
        except (OSError, urllib3.exceptions.HTTPError, client.ApiException) as error:
            raise KubernetesGone(url=self._settings.host, reason=str(error)) from error
        if not 200 <= answer.status < 300:
            raise KubernetesRefused(
                action=f"{method} {path}", status=answer.status, reason=_message(content, answer.status)
            )
        found: Object = json.loads(content)
        return found


def _message(content: bytes, status: int) -> str:
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
