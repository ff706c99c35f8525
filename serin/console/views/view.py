"""A view: one page of the console, what it shows and how often that is read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request

Parameters = Mapping[str, str]
Read = Callable[[Path, Parameters], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """`path`: its route; `template`: in templates/views; `read`: returns what the template shows, from the stack's
    home and the parameters of the path and of `query`; `every_s`: how long the result is used, for all who look."""

    path: str
    template: str
    title: str
    read: Read
    every_s: float = 2.0
    query: tuple[str, ...] = ()  # parameters that may follow the path
    section: str = ""  # the entry of the navigation that is marked


def query_parameters(view: View, request: Request) -> dict[str, str]:
    return {name: request.query_params[name] for name in view.query if name in request.query_params}


def view_parameters(view: View, request: Request) -> dict[str, str]:
    return {**request.path_params, **query_parameters(view, request)}
