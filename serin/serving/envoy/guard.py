"""Envoy's documents for what guards the gateway: the key check (ECDS) and the certificate (SDS). Pure.

Both are separate files that Envoy follows: they change without a new listener, which would drain connections.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from serin.serving.envoy.api_types import DOWNSTREAM_TLS, LUA, SOURCES, followed

Document = dict[str, Any]

KEYS_NAME = "keys"
TLS_NAME = "gateway"


def keys_filter(file: Path) -> Document:
    """The place of the key check in the chain. Without its file requests are refused, not let through."""
    return {"name": KEYS_NAME, "config_discovery": {"config_source": followed(file), "type_urls": [LUA]}}


def keys_document(table: str | None) -> Document:
    """`table`: what keys.lua expects before it (serving/keys.py). None: no key is asked for, and no script runs."""
    check: Document = {"@type": LUA}
    if table is not None:
        check["default_source_code"] = {"inline_string": table + (SOURCES / "keys.lua").read_text()}
    return {"name": KEYS_NAME, "typed_config": check}


def asks_for_keys(published: bytes) -> bool:
    """Whether a discovery response with `keys_document` asks for keys. One that cannot be read may have."""
    try:
        (document,) = json.loads(published)["resources"]
        return "default_source_code" in document["typed_config"]
    except (ValueError, KeyError, TypeError):
        return True


def tls_socket(file: Path) -> Document:
    """TLS for HTTP/1.1, HTTP/2 and gRPC on one port."""
    secret = {"name": TLS_NAME, "sds_config": followed(file)}
    context = {
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificate_sds_secret_configs": [secret],
    }
    return {"name": "tls", "typed_config": {"@type": DOWNSTREAM_TLS, "common_tls_context": context}}


def tls_document(certificate: bytes, key: bytes) -> Document:
    """Both in one document: Envoy never sees a new certificate with an old key."""
    pair = {"certificate_chain": _inline(certificate), "private_key": _inline(key)}
    return {"name": TLS_NAME, "tls_certificate": pair}


def _inline(data: bytes) -> Document:
    return {"inline_bytes": base64.b64encode(data).decode()}
