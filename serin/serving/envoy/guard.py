"""Envoy's documents for what guards the gateway: tokens and keys (ECDS) and the certificate (SDS). Pure.

Three filters check callers. The first verifies a JSON Web Token, if there is one, and lets every request pass; the
second decides by the key or by what the first says of the token, and empties the body of a request that it refuses; the
third answers when the body has ended. Issuers, keys and certificate are separate files that Envoy follows: they change
without a new listener, which would drain connections.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serin.serving.envoy.api_types import (
    DOWNSTREAM_TLS,
    JWT,
    LUA,
    REQUEST_HEADER,
    SOURCES,
    drain_script,
    followed,
    longest_read,
    script_filter,
)
from serin.serving.envoy.issuers import Issuer, provider

Document = dict[str, Any]

ISSUERS_NAME, KEYS_NAME = "issuers", "keys"
TLS_NAME = "gateway"


def keys_filters(keys: Path, issuers: Path, *, answers: bool) -> list[Document]:
    """The places of the checks in the chain. Without their files requests are refused, not let through.

    `answers`: with the filter that answers what was refused; else the request filter does that.
    """
    tokens = {"config_source": followed(issuers), "type_urls": [JWT]}
    discovery = {"config_source": followed(keys), "type_urls": [LUA]}
    refused = {
        "input": {
            "name": "header",
            "typed_config": {"@type": REQUEST_HEADER, "header_name": "x-serin-refused"},
        },
        "value_match": {"contains": " "},  # the header of every refusal does
    }
    passed = {"not_matcher": {"single_predicate": refused}}
    return [
        {"name": ISSUERS_NAME, "config_discovery": tokens},
        {"name": KEYS_NAME, "config_discovery": discovery},
        *([script_filter("refuse", "refuse.lua", unless=passed)] if answers else []),
    ]


def keys_document(table: str | None, max_request_bytes: int) -> Document:
    """`table`: what keys.lua expects before it (serving/keys.py). None: no key is asked for, and no script runs."""
    check: Document = {"@type": LUA}
    if table is not None:
        limits = f"local LIMIT, MOST = {max_request_bytes}, {longest_read(max_request_bytes)}\n"
        text = table + limits + drain_script() + (SOURCES / "keys.lua").read_text()
        check["default_source_code"] = {"inline_string": text}
    return {"name": KEYS_NAME, "typed_config": check}


def issuers_document(keys: Mapping[Issuer, str]) -> Document:
    """`keys`: the public keys of each issuer, as JSON. A token that cannot be verified does not end a request here:
    keys.lua decides."""
    config: Document = {"@type": JWT}
    if keys:
        config["providers"] = {issuer.name: provider(issuer, jwks) for issuer, jwks in keys.items()}
        either: list[Document] = [{"provider_name": issuer.name} for issuer in keys]
        needs = {"requires_any": {"requirements": [*either, {"allow_missing_or_failed": {}}]}}
        config["rules"] = [{"match": {"prefix": "/"}, "requires": needs}]
    return {"name": ISSUERS_NAME, "typed_config": config}


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


def tls_document(certificate: bytes, key: bytes, name: str = TLS_NAME) -> Document:
    """Both in one document: Envoy never sees a new certificate with an old key."""
    pair = {"certificate_chain": _inline(certificate), "private_key": _inline(key)}
    return {"name": name, "tls_certificate": pair}


def trusted_document(authorities: bytes, name: str) -> Document:
    """The certificates of authorities, one of which must have signed the certificate of the other side."""
    return {"name": name, "validation_context": {"trusted_ca": _inline(authorities)}}


def _inline(data: bytes) -> Document:
    return {"inline_bytes": base64.b64encode(data).decode()}
