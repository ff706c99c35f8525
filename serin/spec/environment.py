"""The section `environment`: the packages that your own code imports and the workers lack."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Self

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import Field, field_validator, model_validator

from serin.spec.section import Section, holds_password, is_empty

_FORMS = ("requirements", "lock", "image")


class EnvironmentSpec(Section):
    """Packages for your own code: operators, a module or a script. It has exactly one of these keys."""

    requirements: tuple[str, ...] = Field(default=(), exclude_if=is_empty)
    """The packages, written as for pip: `lightgbm==4.6.0`. They are added to those of the worker, which stay as they
    are. Without exact versions, those of the day on which the environment is made are used."""
    lock: str | None = Field(default=None, exclude_if=is_empty)
    """A `uv.lock`, relative to the spec: the same packages everywhere, compared with their digests."""
    image: str | None = Field(default=None, exclude_if=is_empty)
    """The image of the run's Jobs on Kubernetes. It is built from Serin's image. Other workers refuse it."""

    @field_validator("requirements")
    @classmethod
    def _can_be_read(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for text in given:
            if holds_password(text):
                name = text.partition("@")[0].partition("://")[0].strip()
                raise ValueError(
                    f"the URL of {name!r} holds a password or a token, which would be stored and logged: write "
                    "${NAME} for it, a variable of the workers, or use their .netrc"
                )
            try:
                Requirement(text)
            except InvalidRequirement:
                raise ValueError(
                    f"{text!r} is not a requirement; write for example lightgbm==4.6.0"
                ) from None
        return given

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        given = [form for form in _FORMS if getattr(self, form)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"needs exactly one of {', '.join(_FORMS)}, not {found}")
        return self

    def digest(self) -> str:
        """Of what the section asks for: the requirements in any order, the content of the lock, or the image's name."""
        asked, lock = sorted(str(parsed) for parsed in self.parsed()), self.lock
        with suppress(OSError):  # else its path: it is read when the environment is made
            lock = None if lock is None else hashlib.sha256(Path(lock).read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps([asked, lock, self.image]).encode()).hexdigest()[:32]

    def parsed(self) -> list[Requirement]:
        """The requirements, with the names of packages in their usual form."""
        found = [Requirement(text) for text in self.requirements]
        for one in found:
            one.name = canonicalize_name(one.name)
        return found

    def __str__(self) -> str:
        return self.image or self.lock or ", ".join(self.requirements)
