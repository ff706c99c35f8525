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

from serin.serving.envoy.api_types import (
    DOWNSTREAM_TLS,
    JWT,
    LUA,
    REQUEST_HEADER,
    SOURCES,
    Document,
    drain_script,
    extension,
    followed,
    header_matches,
    longest_read,
    script_filter,
)
from serin.serving.envoy.issuers import Issuer, provider

ISSUERS_NAME, KEYS_NAME = "issuers", "keys"
TLS_NAME = "gateway"


def keys_filters(keys: Path, issuers: Path, *, answers: bool) -> list[Document]:
    """The places of the checks in the chain. Without their files requests are refused, not let through.

    `answers`: with the filter that answers what was refused; else the request filter does that.
    """
    tokens = {"config_source": followed(issuers), "type_urls": [JWT]}
    discovery = {"config_source": followed(keys), "type_urls": [LUA]}
    refused = header_matches(REQUEST_HEADER, "x-serin-refused", {"contains": " "})  # as in every refusal
    passed = {"not_matcher": refused}
    return [
        {"name": ISSUERS_NAME, "config_discovery": tokens},
        {"name": KEYS_NAME, "config_discovery": discovery},
        *([script_filter("refuse", "refuse.lua", unless=passed)] if answers else []),
    ]


def keys_document(table: str | None, max_request_bytes: int) -> Document:
    """`table`: what keys.lua expects before it (keys.py). None: no key is asked for, and no script runs."""
    script = {}
    if table is not None:
        limits = f"local LIMIT, MOST = {max_request_bytes}, {longest_read(max_request_bytes)}\n"
        text = table + limits + drain_script() + (SOURCES / "keys.lua").read_text()
        script["default_source_code"] = {"inline_string": text}
    return extension(KEYS_NAME, LUA, **script)


def issuers_document(keys: Mapping[Issuer, str]) -> Document:
    """`keys`: the public keys of each issuer, as JSON. A token that cannot be verified does not end a request here:
    keys.lua decides."""
    config: Document = {}
    if keys:
        config["providers"] = {issuer.name: provider(issuer, jwks) for issuer, jwks in keys.items()}
        either: list[Document] = [{"provider_name": issuer.name} for issuer in keys]
        needs = {"requires_any": {"requirements": [*either, {"allow_missing_or_failed": {}}]}}
        config["rules"] = [{"match": {"prefix": "/"}, "requires": needs}]
    return extension(ISSUERS_NAME, JWT, **config)


def asks_for_keys(published: bytes) -> bool:
    """Whether a discovery response with `keys_document` asks for keys. One that cannot be read may have."""
    try:
        (document,) = json.loads(published)["resources"]
        return "default_source_code" in document["typed_config"]
    except (ValueError, KeyError, TypeError):
        return True


def tls_socket(file: Path) -> Document:
    """TLS for HTTP/1.1, HTTP/2 and gRPC on one port."""
    return extension("tls", DOWNSTREAM_TLS, common_tls_context=tls_context(TLS_NAME, file, "h2", "http/1.1"))


def tls_context(name: str, file: Path, *protocols: str) -> Document:
    """TLS with the certificate and the key in the secret `name` of a file that Envoy follows."""
    return {
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "alpn_protocols": list(protocols),
        "tls_certificate_sds_secret_configs": [{"name": name, "sds_config": followed(file)}],
    }


def tls_document(certificate: bytes, key: bytes, name: str = TLS_NAME) -> Document:
    """Both in one document: Envoy never sees a new certificate with an old key."""
    pair = {"certificate_chain": _inline(certificate), "private_key": _inline(key)}
    return {"name": name, "tls_certificate": pair}


def trusted_document(authorities: bytes, name: str) -> Document:
    """The certificates of authorities, one of which must have signed the certificate of the other side."""
    return {"name": name, "validation_context": {"trusted_ca": _inline(authorities)}}


def _inline(data: bytes) -> Document:
    return {"inline_bytes": base64.b64encode(data).decode()}
