"""Rate limits: Envoy's token buckets for callers and for models, followed as files (ECDS). Pure.

The buckets are shared by Envoy's threads and belong to one gateway. They are behind the filters that wait for the body
and read it: only then is the model of a gRPC call known, and an answer that comes earlier resets HTTP/2 streams. A
request that is refused here has no arm, so it does not count as evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from serin.serving.envoy.api_types import RATE_LIMIT, Document, extension, followed, set_header
from serin.serving.envoy.issuers import Issuer
from serin.spec.rate import Rate

CALLERS_NAME, MODELS_NAME = "caller_rates", "model_rates"
SUBJECTS_KEPT = 10_000  # whose buckets are remembered; the one that was unused for longest is forgotten first
_PERCENT_100 = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}


def rate_filters(callers: Path, models: Path) -> list[Document]:
    """Returns the places of both limits in the chain; the files hold the documents below."""
    names = ((CALLERS_NAME, callers), (MODELS_NAME, models))
    return [
        {"name": name, "config_discovery": {"config_source": followed(file), "type_urls": [RATE_LIMIT]}}
        for name, file in names
    ]


def caller_rates(keys: Mapping[str, Rate], issuers: Sequence[Issuer]) -> Document:
    """`keys`: the limits by the key's name. An issuer's limit is for each of its subjects. keys.lua says who calls."""
    caller, issuer = _said("DYNAMIC", "caller"), _said("DYNAMIC", "issuer")
    limits = [_limit(rate, caller=name) for name, rate in keys.items()]
    limits += [_limit(each.limit, issuer=each.name, caller=None) for each in issuers if each.limit]
    asked = [{"actions": [caller]}, {"actions": [issuer, caller]}]
    return _document(CALLERS_NAME, limits, asked, wait="%DYNAMIC_METADATA(serin:wait)%")


def model_rates(models: Mapping[str, Rate]) -> Document:
    """The limits by model, which the metadata of its inference routes names."""
    limits = [_limit(rate, model=name) for name, rate in models.items()]
    asked = [{"actions": [_said("ROUTE_ENTRY", "model")]}]
    return _document(MODELS_NAME, limits, asked, wait="%METADATA(ROUTE:serin:wait)%")


def _document(name: str, limits: list[Document], asked: list[Document], *, wait: str) -> Document:
    config: Document = {}
    if limits:
        config = {
            "filter_enabled": _PERCENT_100 | {"runtime_key": f"serin.{name}_enabled"},
            "filter_enforced": _PERCENT_100 | {"runtime_key": f"serin.{name}_enforced"},
            "rate_limits": asked,
            "descriptors": limits,
            "max_dynamic_descriptors": SUBJECTS_KEPT,
            "always_consume_default_token_bucket": False,
            "rate_limited_as_resource_exhausted": True,
            "response_headers_to_add": [set_header("retry-after", wait)],
        }
    return extension(name, RATE_LIMIT, stat_prefix=name, **config)


def _limit(rate: Rate, **entries: str | None) -> Document:
    """Returns a bucket for requests with these entries; None: one for each value."""
    period = f"{rate.period_s}s"
    bucket = {"max_tokens": rate.burst, "tokens_per_fill": rate.count, "fill_interval": period}
    named = [{"key": key} | ({"value": value} if value is not None else {}) for key, value in entries.items()]
    return {"entries": named, "token_bucket": bucket}


def _said(source: str, key: str) -> Document:
    """Returns the action that makes an entry of the metadata `serin`.`key`, and none where it is missing."""
    place = {"key": "serin", "path": [{"key": key}]}
    return {"metadata": {"descriptor_key": key, "metadata_key": place, "source": source}}
