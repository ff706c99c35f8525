"""FastAPI on uvicorn: a process per core, uvloop and httptools; JSON by a pydantic model, or plain bytes.

It returns a Response object, which FastAPI does not validate again: the faster of its two ways. The bytes are as cheap
to read in Python as possible: all numbers by one numpy call, all strings by one split.
"""

from __future__ import annotations

import os

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from benchmarks.serving.peers.graph import Graph

app = FastAPI()
graph = Graph() if "BENCH_MODEL" in os.environ else None


class Columns(BaseModel):
    t0: list[str]
    t1: list[str]
    t2: list[str]
    t3: list[str]
    n0: list[float]
    n1: list[float]
    n2: list[float]
    n3: list[float]
    n4: list[float]
    n5: list[float]


@app.post("/score")
async def score(columns: Columns) -> JSONResponse:
    assert graph is not None
    return JSONResponse({"score": graph.score(columns.__dict__)})


@app.post("/score_bytes")
async def score_bytes(request: Request) -> Response:
    assert graph is not None
    return Response(graph.score_bytes(await request.body()), media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(
        "benchmarks.serving.peers.fastapi_peer:app",
        host="127.0.0.1",
        port=int(os.environ["BENCH_PORT"]),
        workers=int(os.environ["BENCH_WORKERS"]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )
