"""Login and logout, with a secret or an OpenID Connect provider; and forms that change something, which are
read within limits and only from the console's own pages."""

from __future__ import annotations

import hmac
import logging
import math
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from serin.console import oidc
from serin.console.guard import from_own_page, source_of
from serin.console.state import Console, Session, csrf_token, new_session, seal, session2cookie, unseal
from serin.host.console import OidcSettings, matching_account, signing_key

log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w .,@+'\u2019-]{0,60}")
_NAME_REFUSED = (
    "A name has at most 60 characters: letters, digits, spaces and . , @ + - _ '. Change it and log in again."
)
_STARTED = "serin-oidc"
_STARTED_S = 600
_MOST_BYTES = 16_384
_FORM = "application/x-www-form-urlencoded"


class Login:
    def __init__(self, console: Console) -> None:
        self._console = console

    async def form(self, request: Request) -> Response:
        if await self._console.session(request):
            return RedirectResponse(local_path(request.query_params), 303)
        return self._page(request)

    async def with_secret(self, request: Request) -> Response:
        """Logs in with a secret. What was typed is neither repeated nor logged. A right one is never refused: it
        has 256 random bits, and nothing distinguishes a person from others at the same source."""
        console = self._console
        fields = await read_form(console, request)
        source = await run_in_threadpool(source_of, request)
        accepted = console.settings.secrets
        account = matching_account(console.home, fields.get("secret", "").strip()) if accepted else None
        if account is None:
            return self._refuse(request, source, fields)
        name = fields.get("name", "").strip()
        if not _NAME.fullmatch(name):
            return self._page(request, _NAME_REFUSED, 400, fields)
        log.info("%s logged in from %s%s", account, source, f" as {name}" if name else "")
        answer = RedirectResponse(local_path(fields), 303)
        who = f"{name} (console {account})" if name else f"console {account}"
        self._remember(request, answer, new_session(account, who, lasts_s=console.settings.session))
        return answer

    def _refuse(self, request: Request, source: str, fields: Mapping[str, str]) -> Response:
        wrong, wait_s = "This is not one of the console's secrets", self._console.attempts.fail(source)
        if not wait_s:
            log.warning("a login from %s failed", source)
            return self._page(request, f"{wrong}.", 401, fields)
        text = f"{wrong}, and it is the next of too many: wait {math.ceil(wait_s)} s before you try another."
        refused = self._page(request, text, 429, fields)
        refused.headers["retry-after"] = str(math.ceil(wait_s))
        return refused

    async def logout(self, request: Request) -> Response:
        session = await self._console.session(request)
        if session is not None:
            await read_signed_form(self._console, request, session)
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(
            self._console.cookie(request),
            secure=self._console.is_secure(request),
            httponly=True,
            samesite="strict",
        )
        return answer

    async def start(self, request: Request) -> Response:
        """Sends the browser to the provider. What the answer must contain is kept in a short-lived cookie."""
        settings = self._provider()
        try:
            begun = await run_in_threadpool(oidc.begin, settings, self._callback_url)
        except oidc.LoginRefused as refusal:
            return self._page(request, str(refusal), 502)
        answer = RedirectResponse(begun.url, 303)
        started = {"state": begun.state, "nonce": begun.nonce, "verifier": begun.verifier}
        answer.set_cookie(
            _STARTED,
            seal({**started, "next": local_path(request.query_params)}, self._key),
            max_age=_STARTED_S,
            path="/login",
            secure=self._console.is_secure(request),
            httponly=True,
            samesite="lax",  # the provider's redirect is a navigation from another site
        )
        return answer

    async def callback(self, request: Request) -> Response:
        """Takes the provider's answer: one with a wrong state, nonce or signature logs nobody in."""
        settings, sent = self._provider(), request.query_params
        started = unseal(request.cookies.get(_STARTED, ""), self._key)
        if started is None or sent.get("state") != started["state"]:
            return self._page(request, "This login was not started here, or took too long. Start again.", 400)
        if "code" not in sent:
            return self._page(request, f"The provider refused: {sent.get('error', 'no reason')[:80]}", 401)
        begun = oidc.Begun(url="", **{name: started[name] for name in ("state", "nonce", "verifier")})
        try:
            person = await run_in_threadpool(oidc.finish, settings, begun, sent["code"], self._callback_url)
        except oidc.LoginRefused as refusal:
            log.warning("an OpenID Connect login was refused: %s", refusal)
            return self._page(request, str(refusal), 403)
        log.info("%s logged in", person.who)
        # A redirect would still count as coming from the provider's site, and carry no strict cookie.
        answer = self._console.page(request, "continue", title="Logged in", target=started["next"])
        lasts_s = self._console.settings.session
        session = new_session(
            "oidc", person.who, lasts_s=lasts_s, subject=person.subject, groups=person.groups
        )
        self._remember(request, answer, session)
        answer.delete_cookie(_STARTED, path="/login")
        return answer

    def _remember(self, request: Request, answer: Response, session: Session) -> None:
        console = self._console
        answer.set_cookie(
            console.cookie(request),
            session2cookie(console.home, session),
            max_age=int(console.settings.session),
            path="/",
            secure=console.is_secure(request),
            httponly=True,
            samesite="strict",
        )

    def _page(
        self, request: Request, problem: str = "", status: int = 200, fields: Mapping[str, str] | None = None
    ) -> HTMLResponse:
        """Returns the form. `fields`: those of one that was refused, which leads to the same page afterwards."""
        return self._console.page(
            request,
            "login",
            status=status,
            title="Log in",
            problem=problem,
            next=local_path(fields or request.query_params),
            secrets=self._console.settings.secrets,
            provider=self._console.provider_name,
        )

    def _provider(self) -> OidcSettings:
        settings = self._console.settings.oidc
        if settings is None:
            raise HTTPException(404, "no OpenID Connect provider is configured")
        return settings

    @property
    def _callback_url(self) -> str:
        return f"{self._console.settings.url}/login/oidc/done"

    @property
    def _key(self) -> bytes:
        return signing_key(self._console.home, "viewer")


def local_path(fields: Mapping[str, str]) -> str:
    """Returns the page to go to after the login; never one of another site."""
    path = fields.get("next", "/")
    return path if re.fullmatch(r"/(?![/\\])[\w/.-]*", path) else "/"


async def read_form(console: Console, request: Request) -> dict[str, str]:
    """Returns the fields of a form. Raises HTTPException for another page's, and for what is not a form."""
    if not from_own_page(request, console.settings.url):
        raise HTTPException(403, "this form was not sent from a page of the console")
    if request.headers.get("content-type", "").partition(";")[0].strip() != _FORM:
        raise HTTPException(415, "a form is expected")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise HTTPException(413, "the form is too large")
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=20))
    except ValueError as error:
        raise HTTPException(400, "the form cannot be read") from error


async def read_signed_form(console: Console, request: Request, session: Session) -> dict[str, str]:
    """Returns the fields of a form that this session's page contained, or that a program sends with its key."""
    fields = await read_form(console, request)
    if session.is_key:
        return fields
    expected = csrf_token(console.home, session)
    if not hmac.compare_digest(fields.get("csrf", "").encode(), expected.encode()):
        raise HTTPException(403, "this form is not from your session; open the page again and repeat")
    return fields
