"""The console as a web application: its routes, the data of its charts, and what an error looks like."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from anyio import CapacityLimiter, to_thread
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from serin.console.actions import ACTIONS, Actions
from serin.console.guard import Guard
from serin.console.login import Login
from serin.console.state import STATIC, Console, check_sees, sent_key, unknown_visitor
from serin.console.views import (
    experiments,
    machines,
    models,
    monitoring,
    reasons,
    rollouts,
    searches,
    traffic,
)
from serin.console.views.traffic import SPANS, chosen_span, span_history
from serin.console.views.view import View, query_parameters, view_parameters
from serin.errors import NameInvalid, NotFound, SerinError, file_trouble
from serin.host.console import ConsoleSettings
from serin.monitoring.history.read import HistoryPoint, HistoryView, SeriesHistory
from serin.reports.charts import DAY, NIGHT, SERIES

_MOST_STREAMS: Final = 200
_SLOW_THREADS: Final = 4  # of each view that is slow ...
_MOST_WAIT: Final = 8  # ... and requests that wait for one of them
_QUIET_S: Final = 15.0  # a comment is sent after this time, so that proxies keep the connection
_ARMS: Final = {"stable": "blue", "candidate": "orange", "baseline": "pale", "pinned": "grey"}
_WHAT: Final = ("latency", "failures", "requests")
_MODEL: Final = "/models/{model}"

VIEWS: Final = (
    View("/", "overview", "models", "Models", models.read_overview, every_s=3.0),
    View("/rollouts", "rollouts", "rollouts", "Rollouts", rollouts.read_rollouts),
    View("/alerts", "alerts", "alerts", "Alerts", monitoring.read_alert_list),
    View("/runs", "runs", "runs", "Runs", machines.read_runs, every_s=5.0),
    View("/runs/{run}", "run", "runs", "Run {run}", machines.read_run, every_s=5.0),
    View("/experiments", "experiments", "experiments", "Experiments", experiments.read_experiments, every_s=5.0,
         query=("model", "kind", "state", "text", "sort", "page")),
    View("/experiments/compare", "compare", "experiments", "Trainings side by side", experiments.read_compared,
         every_s=5.0, query=("run",)),
    View("/experiments/searches", "searches", "experiments", "Searches", searches.read_searches, every_s=5.0,
         query=("page",)),
    View("/experiments/searches/{run}", "search", "experiments", "{run}", searches.read_search, every_s=5.0,
         query=("page",)),
    View("/gpus", "gpus", "gpus", "GPUs", machines.read_gpus),
    View(_MODEL, "model", "models", "{model}", models.read_model),
    View(f"{_MODEL}/rollout", "rollout", "models", "Rollout of {model}", rollouts.read_rollout, every_s=1.0),
    View(f"{_MODEL}/traffic", "traffic", "models", "Traffic of {model}", traffic.read_traffic, every_s=5.0,
         query=("span",)),
    View(f"{_MODEL}/drift", "drift", "models", "Drift of {model}", monitoring.read_drift_watch, every_s=10.0),
    View(f"{_MODEL}/quality", "quality", "models", "Quality of {model}", monitoring.read_live_quality, every_s=10.0),
    View(f"{_MODEL}/captures", "captures", "models", "Captures of {model}", monitoring.read_recorded, every_s=5.0),
    View(f"{_MODEL}/request", "request", "models", "A request of {model}", reasons.read_request, every_s=5.0,
         query=("id", "row"), live=False, slow=True),
)  # fmt: skip


class Live:
    """The streams of all views."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._streams = 0

    def handler(self, view: View) -> Callable[[Request], Awaitable[Response]]:
        async def stream(request: Request) -> Response:
            session = await self._console.required_session(request)
            check_sees(session.access, request.path_params.get("model"))
            if self._streams >= _MOST_STREAMS:
                raise HTTPException(503, "too many open pages")
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(
                self._events(view, request), media_type="text/event-stream", headers=headers
            )

        return stream

    async def _events(self, view: View, request: Request) -> AsyncIterator[str]:
        self._streams += 1
        try:
            sent, quiet_s = request.query_params.get("seen", ""), 0.0
            yield "retry: 3000\n\n"
            while not await request.is_disconnected():
                session = await self._console.session(request)
                if session is None:
                    yield event("ended", "")
                    return
                try:
                    html = await run_in_threadpool(
                        self._console.fragment, view, view_parameters(view, request), session.access
                    )
                except HTTPException:  # the role for this model is gone
                    yield event("ended", "")
                    return
                except (SerinError, OSError) as error:
                    log.warning("%s cannot be read: %s", view.path, error)
                else:
                    digest = fingerprint(html)
                    quiet_s += view.every_s
                    if digest != sent:
                        sent, quiet_s = digest, 0.0
                        yield event("view", html)
                if quiet_s >= _QUIET_S:
                    quiet_s = 0.0
                    yield ": waiting\n\n"
                await asyncio.sleep(view.every_s)
        finally:
            self._streams -= 1


def event(name: str, text: str) -> str:
    """Returns one event; its text may have several lines."""
    data = "\n".join(f"data: {line}" for line in text.splitlines() or [""])
    return f"event: {name}\n{data}\n\n"


def fingerprint(html: str) -> str:
    return hashlib.sha256(html.encode()).hexdigest()[:16]


log = logging.getLogger(__name__)

_TITLES: Final = {401: "Not logged in", 403: "Not allowed", 404: "Not found", 409: "Not done"}
_YEAR = "max-age=31536000, immutable"


def build_app(
    home: Path, settings: ConsoleSettings, port: int, follow: Callable[[], ConsoleSettings] | None = None
) -> Starlette:
    """Returns the console of the stack in `home`. `follow` returns the settings as they are at each request; None:
    they do not change."""
    console = Console(home, follow or (lambda: settings), port)
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
        *(Route(f"/live{view.path}", live.handler(view), methods=["GET"]) for view in VIEWS if view.live),
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
    own_threads = CapacityLimiter(_SLOW_THREADS) if view.slow else None  # others share those of the server

    async def page(request: Request) -> Response:
        session = await console.session(request)
        if session is None and sent_key(request) is None:
            return RedirectResponse(f"/login?next={request.url.path}", 303)
        if session is None:
            raise unknown_visitor(request)
        parameters = view_parameters(view, request)
        if own_threads and own_threads.statistics().tasks_waiting >= _MOST_WAIT:
            raise HTTPException(503, "too many people wait for such pages; try again in a moment")
        html = await to_thread.run_sync(
            console.fragment, view, parameters, session.access, limiter=own_threads
        )
        seen = urlencode({**query_parameters(view, request), "seen": fingerprint(html)})
        done = request.query_params.get("done")
        return console.page(
            request,
            "page",
            session=session,
            section=view.section,
            title=view.title.format(**parameters),
            content=Markup(html),  # noqa: S704 (rendered by a template that escapes)
            live=f"/live{request.url.path}?{seen}" if view.live else None,
            done=ACTIONS[done].label if done in ACTIONS else None,
        )

    return page


def _handlers(console: Console) -> Mapping[Any, Any]:
    async def problem(request: Request, status: int, text: str) -> Response:
        if sent_key(request) is not None:
            return JSONResponse({"error": text}, status)
        title = _TITLES.get(status) or ("Not done" if request.method == "POST" else "Not shown")
        try:
            session = await console.session(request)
        except SerinError:  # the key that signs sessions may be what cannot be read
            session = None
        return console.page(request, "problem", status=status, session=session, title=title, text=text)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        unnamed = error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase
        text = f"the console has no page {request.url.path}" if unnamed else error.detail
        return await problem(request, error.status_code, text)

    async def failed(request: Request, error: Exception) -> Response:
        return await problem(request, 404 if isinstance(error, NotFound | NameInvalid) else 503, str(error))

    async def unreadable(request: Request, error: Exception) -> Response:
        assert isinstance(error, OSError)
        log.error("%s failed", request.url.path, exc_info=error)
        return await problem(request, 503, file_trouble(error))

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        return await problem(
            request, 500, f"this page cannot be shown: {type(error).__name__}; the console's log says more"
        )

    return {
        HTTPException: refused,
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


def stylesheet() -> str:
    """Returns the colours as variables. `data-theme` on the root element overrides the system's choice."""
    day, night = (
        "".join(f"--{name}:{code};" for name, code in each.items()) + f"color-scheme:{scheme};"
        for each, scheme in ((DAY, "light"), (NIGHT, "dark"))
    )
    return (
        f":root{{{day}}}\n"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{night}}}}}\n"
        f":root[data-theme=dark]{{{night}}}\n"
    )


def history_data(console: Console) -> Callable[[Request], Awaitable[Response]]:
    async def data(request: Request) -> Response:
        session = await console.required_session(request)
        model = request.path_params["model"]
        check_sees(session.access, model)
        what, span = request.query_params.get("what", ""), chosen_span(request.query_params)
        if what not in _WHAT:
            raise HTTPException(404, "there is no such chart")
        await run_in_threadpool(models.known_model, console.home, model)
        found = await run_in_threadpool(chart_data, console.home, model, what, span)
        return JSONResponse(found)

    return data


def chart_data(home: Path, model: str, what: str, span: str) -> dict[str, Any]:
    """Returns columns of numbers: times first, then one for each line. None breaks a line."""
    found = span_history(home, model, span)
    times = _grid(found, span) if found else []
    lines: list[dict[str, Any]] = []
    columns: list[list[Any]] = [list(times)]
    for series, colour in _coloured(found):
        by_time = {point.t: point for point in series.points}
        for label, value, style in _lines(what, series):
            lines.append({"label": label, "colour": colour, **style})
            columns.append([value(by_time[t]) if t in by_time else None for t in times])
    return {
        "fingerprint": f"{what}:{[line['label'] for line in lines]}",
        "unit": {"latency": " ms", "failures": "%", "requests": ""}[what],
        "zero": what != "latency",
        "log": what == "latency",
        "series": lines,
        "columns": columns,
    }


def _grid(found: HistoryView, span: str) -> list[int]:
    """Returns times at equal distances over the whole span, so that a pause is a gap, and those of other points."""
    times = {point.t for series in found.series for point in series.points}
    if not times:
        return []
    step = SPANS[span][1]
    regular = range(int(found.since) // step * step, int(found.until), step)
    return sorted({*times, *regular})


def _coloured(found: HistoryView | None) -> list[tuple[SeriesHistory, str]]:
    """Returns the series with a colour each: an arm's own for its newest release, others for older ones."""
    spare, taken, coloured = iter(SERIES * 20), set[str](), []
    series_of = found.series if found else ()
    for series in sorted(series_of, key=lambda each: -max((point.t for point in each.points), default=0)):
        colour = _ARMS.get(series.arm, "")
        if not colour or colour in taken:
            colour = next(spare)
        taken.add(colour)
        coloured.append((series, colour))
    return sorted(coloured, key=lambda each: (each[0].release, each[0].arm))


def _lines(
    what: str, series: SeriesHistory
) -> list[tuple[str, Callable[[HistoryPoint], float | None], dict[str, Any]]]:
    name = f"{series.release} {series.arm}".strip()
    if what == "latency":
        return [
            (f"{name} p99", lambda point: point.p99_ms, {"width": 2}),
            (f"{name} p50", lambda point: point.p50_ms, {"dash": [3, 4], "width": 1.2}),
        ]
    if what == "failures":
        return [
            (
                name,
                lambda point: 100 * point.errors / point.requests if point.requests else None,
                {"width": 2},
            )
        ]
    return [(f"{name} requests/s", lambda point: point.requests / point.width_s, {"width": 2})]
