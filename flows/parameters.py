"""Types that several flows take as parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from serin.spec.json_schema import inlined_schema

Stage = Literal["etl", "train", "export"]
"""A stage that can be run again on request."""

Spec = str | Annotated[dict[str, Any], WithJsonSchema(inlined_schema())]
"""A path (relative to the application folder) or the spec itself.

Prefect shows a form for it and refuses a value of another type; the run reports every other mistake.
"""
