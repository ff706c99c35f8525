"""The console as a web application: its routes, and what an error looks like."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from serin.console.actions import ACTIONS, Actions
from serin.console.guard import Guard
from serin.console.history_data import history_data
from serin.console.live import Live, fingerprint
from serin.console.login import Login
from serin.console.palette import stylesheet
from serin.console.state import STATIC, Console
from serin.console.views.all_views import VIEWS
from serin.console.views.view import View, query_parameters, view_parameters
from serin.errors import NameInvalid, NotFound, SerinError, file_trouble
from serin.stack.console.settings import ConsoleSettings

log = logging.getLogger(__name__)

_TITLES: Final = {401: "Not logged in", 403: "Not allowed", 404: "Not found", 409: "Not done"}
_YEAR = "max-age=31536000, immutable"


def build_app(home: Path, settings: ConsoleSettings, port: int) -> Starlette:
    """Returns the console of the stack in `home`."""
    console = Console(home, settings, port)
    login, actions, live = Login(console), Actions(console), Live(console)
    action = "/models/{model}/rollout/{kind}"
    alert = "/alerts/{alert}/{what}"
    routes = [
        Route("/health", _health),
        Route("/palette.css", _palette),
        Route("/login", login.form, methods=["GET"]),
        Route("/login", login.with_secret, methods=["POST"]),
        Route("/login/oidc", login.start, methods=["GET"]),
        Route("/login/oidc/done", login.callback, methods=["GET"]),
        Route("/logout", login.logout, methods=["POST"]),
        Route("/models", _models, methods=["GET"]),
        *(Route(view.path, _page(console, view), methods=["GET"]) for view in VIEWS),
        *(Route(f"/live{view.path}", live.handler(view), methods=["GET"]) for view in VIEWS),
        Route(action, actions.ask_rollout, methods=["GET"]),
        Route(action, actions.do_rollout, methods=["POST"]),
        Route(alert, actions.ask_alert, methods=["GET"]),
        Route(alert, actions.do_alert, methods=["POST"]),
        Route("/models/{model}/history.json", history_data(console), methods=["GET"]),
        Mount("/static", _Static(directory=STATIC)),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, url=settings.url, address=settings.address)],
        exception_handlers=_handlers(console),
    )


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok")


async def _models(_: Request) -> Response:
    return RedirectResponse("/", 308)


async def _palette(_: Request) -> Response:
    return Response(stylesheet(), media_type="text/css", headers={"cache-control": "max-age=3600"})


def _page(console: Console, view: View) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        session = console.session(request)
        if session is None:
            return RedirectResponse(f"/login?next={request.url.path}", 303)
        parameters = view_parameters(view, request)
        html = await run_in_threadpool(console.fragment, view, parameters, may_act=session.may_act)
        done = request.query_params.get("done")
        return console.page(
            request,
            "page",
            session=session,
            section=view.section,
            title=view.title.format(**parameters),
            content=Markup(html),  # noqa: S704 (rendered by a template that escapes)
            live=f"/live{request.url.path}?{urlencode({**query_parameters(view, request), 'seen': fingerprint(html)})}",
            done=ACTIONS[done].label if done in ACTIONS else None,
        )

    return page


def _handlers(console: Console) -> Mapping[Any, Any]:
    def problem(request: Request, status: int, text: str) -> Response:
        title = _TITLES.get(status) or ("Not done" if request.method == "POST" else "Not shown")
        try:
            session = console.session(request)
        except SerinError:  # the key that signs sessions may be what cannot be read
            session = None
        return console.page(request, "problem", status=status, session=session, title=title, text=text)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        unnamed = error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase
        text = f"the console has no page {request.url.path}" if unnamed else error.detail
        return problem(request, error.status_code, text)

    async def unknown(request: Request, error: Exception) -> Response:
        return problem(request, 404, str(error))

    async def failed(request: Request, error: Exception) -> Response:
        return problem(request, 503, str(error))

    async def unreadable(request: Request, error: Exception) -> Response:
        assert isinstance(error, OSError)
        log.error("%s failed", request.url.path, exc_info=error)
        return problem(request, 503, file_trouble(error))

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        return problem(
            request, 500, f"this page cannot be shown: {type(error).__name__}; the console's log says more"
        )

    return {
        HTTPException: refused,
        NotFound: unknown,
        NameInvalid: unknown,
        SerinError: failed,
        OSError: unreadable,
        Exception: unexpected,
    }


class _Static(StaticFiles):
    """Files of the page. One that is asked for with its digest may be kept forever."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        if b"v=" in scope["query_string"]:
            response.headers["cache-control"] = _YEAR
        return response
