"""What the console's handlers share: settings, templates, rendered views, and who asks.

A session is a signed cookie that only the browser's requests to the console carry. Nothing is stored on the server. A
session ends with its time, or when the secret of its login is replaced. What it may do is decided at each request,
from the settings as they are then. A program has no session: it sends an API key with each request.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import jwt
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from serin.cluster.shared_keys import current_keys
from serin.console import formats
from serin.console.guard import Attempts
from serin.console.views.view import Parameters, Recent, View
from serin.errors import SerinError
from serin.host.console import ACCOUNT_ROLES, Account, ConsoleSettings, signing_key
from serin.host.state import read_stack
from serin.spec.names import valid_model_name
from serin.spec.roles import NOTHING, Access

STATIC = Path(__file__).parent / "static"
_MOST_KEPT = 500


Login = Literal[Account, "oidc"]
_LOGINS: Final[tuple[Login, ...]] = ("viewer", "operator", "oidc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Somebody who is logged in, or a key that a program sends. `who` is written into the journal with what they do.

    `subject` and `groups`: of a person whom the provider has named. `access` is decided for each request; no cookie
    has it."""

    login: Login | Literal["key"]
    who: str
    ends: float
    id: str
    subject: str = ""
    groups: tuple[str, ...] = ()
    access: Access = NOTHING

    @property
    def is_key(self) -> bool:
        return self.login == "key"


def new_session(
    login: Login, who: str, *, lasts_s: float, subject: str = "", groups: tuple[str, ...] = ()
) -> Session:
    ends, name = time.time() + lasts_s, secrets.token_urlsafe(16)
    return Session(login=login, who=who, ends=ends, id=name, subject=subject, groups=groups)


def session2cookie(home: Path, session: Session) -> str:
    assert session.login != "key", "a key is sent with each request"
    fields = asdict(session)
    del fields["access"]
    return seal(fields, signing_key(home, session.login))


def cookie2session(home: Path, cookie: str) -> Session | None:
    """Returns the session of a cookie, without its access; None for one that is forged, expired or signed with an old
    secret."""
    for login in _LOGINS:
        value = unseal(cookie, signing_key(home, login))
        if value is not None and value.get("login") == login:
            session = Session(**{**value, "groups": tuple(value["groups"])})
            return session if session.ends > time.time() else None
    return None


def csrf_token(home: Path, session: Session) -> str:
    """Returns what a form must contain: another site can neither read nor guess it. A key needs none: no browser
    sends it by itself."""
    if session.login == "key":
        return ""
    signed = f"csrf:{session.id}".encode()
    return hmac.new(signing_key(home, session.login), signed, hashlib.sha256).hexdigest()


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

    def __init__(self, home: Path, settings: Callable[[], ConsoleSettings], port: int) -> None:
        self.home, self._follow, self.port = home, settings, port
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
        self._environment.globals.update(asset=_asset, act_of=act_of, home_name=str(home))

    @property
    def settings(self) -> ConsoleSettings:
        """As they are now."""
        return self._follow()

    async def session(self, request: Request) -> Session | None:
        """Returns who asks; None for nobody who may see anything."""
        return await run_in_threadpool(self._session, request)

    async def required_session(self, request: Request) -> Session:
        session = await self.session(request)
        if session is None:
            raise unknown_visitor(request)
        return session

    def _session(self, request: Request) -> Session | None:
        if (key := sent_key(request)) is not None:
            return self._session_of_key(key)
        session = cookie2session(self.home, request.cookies.get(self.cookie(request), ""))
        if session is None:
            return None
        session = replace(session, access=self._access(session))
        return session if session.access.grants else None

    def _session_of_key(self, key: str) -> Session | None:
        found = current_keys(self.home).find(key)
        if found is None or found.role is None or found.state(time.time()) != "good":
            return None
        access = Access.of(("*",) if found.models is None else found.models, found.role)
        return Session(login="key", who=f"key {found.name}", ends=0.0, id="", access=access)

    def _access(self, session: Session) -> Access:
        settings = self.settings
        if session.login == "oidc":
            return settings.oidc.access(session.groups) if settings.oidc else NOTHING
        if session.login == "key" or not settings.secrets:
            return NOTHING
        return Access.of(("*",), ACCOUNT_ROLES[session.login])

    def is_secure(self, request: Request) -> bool:
        """Returns whether the browser uses TLS: a proxy in front does, or the stack's gateway."""
        return request.url.scheme == "https" or (self.settings.url or "").startswith("https://")

    def cookie(self, request: Request) -> str:
        return "__Host-serin" if self.is_secure(request) else f"serin-{self.port}"

    def fragment(self, view: View, parameters: Parameters, access: Access) -> str:
        """Returns the view as HTML; it is read and rendered at most once in `view.every_s` for all with this access.
        Raises HTTPException for a model that they may not view, and NameInvalid for what cannot be one."""
        model = parameters["model"] if "{model}" in view.path else None
        check_sees(access, model)
        if model is not None:
            valid_model_name(model)

        def render() -> str:
            shown = view.read(self.home, parameters, access)
            template = self._environment.get_template(f"views/{view.template}.html")
            return template.render(shown, access=access, now=time.time())

        key = (view.template, repr(sorted(parameters.items())), access)
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


def act_of(kind: str) -> str:
    """Returns the name of a command to the controller in the table of acts."""
    return kind if kind == "retire" else f"rollout {kind}"


def sent_key(request: Request) -> str | None:
    """Returns the API key that a program has sent; None: it has sent none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def unknown_visitor(request: Request) -> HTTPException:
    """Returns the answer to somebody who has no session and no key with a role."""
    if sent_key(request) is None:
        return HTTPException(401, "log in first")
    return HTTPException(401, "this key is not known here, has expired, or has no role (`serin keys list`)")


def check_sees(access: Access, model: str | None) -> None:
    """Raises HTTPException for a model that somebody may not view; it does not say whether there is one."""
    if not access.sees(model):
        raise HTTPException(403, f"you have no role for {model}; ask those who administer this console")


@functools.cache
def _asset(name: str) -> str:
    """The address of a static file with a part of its digest, so that a browser keeps it as long as it is current."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"
