"""Forms that change something: read within limits, and only from the console's own pages."""

from __future__ import annotations

import hmac
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

from serin.console.guard import from_own_page
from serin.console.sessions import Session, csrf_token
from serin.console.state import Console

_MOST_BYTES = 16_384
_FORM = "application/x-www-form-urlencoded"


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
    """Returns the fields of a form that this session's page contained."""
    fields = await read_form(console, request)
    expected = csrf_token(console.home, session)
    if not hmac.compare_digest(fields.get("csrf", "").encode(), expected.encode()):
        raise HTTPException(403, "this form is not from your session; open the page again and repeat")
    return fields
