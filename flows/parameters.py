"""Types that several flows take as parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from serin.spec.json_schema import inlined_schema

Stage = Literal["etl", "train", "export"]
"""A stage that can be run again on request."""

Spec = str | Annotated[dict[str, Any], WithJsonSchema(inlined_schema())]
"""A package (`package:DIGEST`), a URL, a path on the worker or the spec itself (serin/pipeline/open_spec.py).

Prefect shows a form for it and refuses a value of another type; the run reports every other mistake.
"""
