"""What the console's handlers share: settings, templates, rendered views, and who is logged in.

A session is a signed cookie that only the browser's requests to the console carry. Nothing is stored on the server. A
session ends with its time, or when the secret of its role is replaced.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from serin.console import formats
from serin.console.guard import Attempts
from serin.console.views.view import Parameters, Recent, View
from serin.errors import SerinError
from serin.host.console import ROLES, ConsoleSettings, Role, signing_key
from serin.host.state import read_stack

STATIC = Path(__file__).parent / "static"
_MOST_KEPT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Somebody who is logged in. `who` is written into the journal with what they do."""

    role: Role
    who: str
    ends: float
    id: str

    @property
    def may_act(self) -> bool:
        return self.role == "operator"


def new_session(role: Role, who: str, *, lasts_s: float) -> Session:
    return Session(role=role, who=who, ends=time.time() + lasts_s, id=secrets.token_urlsafe(16))


def session2cookie(home: Path, session: Session) -> str:
    return seal(asdict(session), signing_key(home, session.role))


def cookie2session(home: Path, cookie: str) -> Session | None:
    """Returns the session of a cookie; None for one that is forged, expired or signed with an old secret."""
    for role in ROLES:
        value = unseal(cookie, signing_key(home, role))
        if value is not None and value.get("role") == role:
            session = Session(**value)
            return session if session.ends > time.time() else None
    return None


def csrf_token(home: Path, session: Session) -> str:
    """Returns what a form must contain: another site can neither read nor guess it."""
    return hmac.new(
        signing_key(home, session.role), f"csrf:{session.id}".encode(), hashlib.sha256
    ).hexdigest()


def seal(value: Mapping[str, Any], key: bytes) -> str:
    """Returns `value` with a signature, for a cookie. It can be read by anyone who has it."""
    return jwt.encode(dict(value), key, algorithm="HS256")


def unseal(text: str, key: bytes) -> dict[str, Any] | None:
    """Returns the value that was sealed with this key; None for anything else."""
    try:
        return dict(jwt.decode(text, key, algorithms=["HS256"]))
    except jwt.InvalidTokenError:
        return None


class Console:
    """One console. `port` makes the cookie's name: two stacks on one machine have different ones."""

    def __init__(self, home: Path, settings: ConsoleSettings, port: int) -> None:
        self.home, self.settings, self.port = home, settings, port
        self.attempts = Attempts()
        self._rendered = Recent[str](_MOST_KEPT)
        self._environment = Environment(
            loader=PackageLoader("serin.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(formats.FILTERS)
        self._environment.globals.update(asset=_asset, home_name=str(home))

    def session(self, request: Request) -> Session | None:
        return cookie2session(self.home, request.cookies.get(self.cookie(request), ""))

    def is_secure(self, request: Request) -> bool:
        """Returns whether the browser uses TLS: a proxy in front does, or the stack's gateway."""
        return request.url.scheme == "https" or (self.settings.url or "").startswith("https://")

    def cookie(self, request: Request) -> str:
        return "__Host-serin" if self.is_secure(request) else f"serin-{self.port}"

    def fragment(self, view: View, parameters: Parameters, *, may_act: bool) -> str:
        """Returns the view as HTML; it is read and rendered at most once in `view.every_s` for everybody."""

        def render() -> str:
            shown = view.read(self.home, parameters)
            template = self._environment.get_template(f"views/{view.template}.html")
            return template.render(shown, may_act=may_act, now=time.time())

        key = (view.template, repr(sorted(parameters.items())), may_act)
        return self._rendered.get(key, view.every_s, render)

    def forget(self) -> None:
        """Makes every view be read again: somebody has changed something."""
        self._rendered.forget()

    def page(
        self,
        request: Request,
        template: str,
        *,
        status: int = 200,
        session: Session | None = None,
        **values: Any,
    ) -> HTMLResponse:
        """Returns a page in the console's frame."""
        try:
            stack = read_stack(self.home)
        except SerinError:  # the page says so where it needs it
            stack = None
        html = self._environment.get_template(f"{template}.html").render(
            {"section": "", "title": "", "live": None, "content": Markup(""), **values},
            session=session,
            csrf=csrf_token(self.home, session) if session else "",
            prefect_url=stack.prefect_ui_url if stack and stack.prefect_api_url else None,
            path=request.url.path,
        )
        return HTMLResponse(html, status_code=status)

    @property
    def provider_name(self) -> str | None:
        return urlsplit(self.settings.oidc.issuer).hostname if self.settings.oidc else None


@functools.cache
def _asset(name: str) -> str:
    """The address of a static file with a part of its digest, so that a browser keeps it as long as it is current."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"
