"""Which columns become features, and by which steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, SerializeAsAny, model_validator

from serin.spec.section import Section
from serin.spec.steps import Step, dump_step, parse_step

StepField = Annotated[
    SerializeAsAny[Step], BeforeValidator(parse_step), PlainSerializer(dump_step, return_type=Any)
]


class FeatureSpec(Section):
    columns: tuple[str, ...] = Field(min_length=1)
    steps: tuple[StepField, ...] = Field(min_length=1)

    @property
    def makes(self) -> Literal["numeric", "categorical"]:
        return self.steps[-1].makes

    @model_validator(mode="after")
    def _steps_fit_together(self) -> Self:
        categorical = [step.name for step in self.steps if step.makes == "categorical"]
        if categorical and len(self.steps) > 1:
            raise ValueError(
                f"{categorical[0]} makes codes and stands alone; "
                "take the other steps out or give them a feature of their own"
            )
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("a column stands twice in `columns`; name each once")
        return self
