-- Looks into a request before the router does, which cannot: the model's name (and version) in a gRPC message become
-- headers, and shapes that no data can fill are refused. shapes.lua and message.lua come before this text.

local NAMED = {
  ["/inference.GRPCInferenceService/ModelInfer"] = true,
  ["/inference.GRPCInferenceService/ModelReady"] = true,
  ["/inference.GRPCInferenceService/ModelMetadata"] = true,
}
local INFER = "/inference.GRPCInferenceService/ModelInfer"
local FRAME_BYTES = 5 -- a flag and the length

local function refuse(handle, http, grpc, text)
  handle:respond({[":status"] = http, ["grpc-status"] = grpc}, text)
end

-- Binary tensors follow a JSON text whose length a header tells; without it all is JSON.
local function check_json(handle, json_bytes)
  local body = handle:body()
  if body == nil then
    return
  end
  local length = body:length()
  if json_bytes ~= nil then
    length = json_bytes:find("^%d+$") and tonumber(json_bytes) or math.huge
  end
  if length > body:length() then
    refuse(handle, "400", "3", "inference-header-content-length is no length of a part of this request")
    return
  end
  local most = body:length()
  if length > HARMLESS_BYTES then -- in less nothing is long
    most = handle:metadata():get("max_text_bytes") or most -- the route knows its model
  end
  local fault = length > 0 and json_fault(body:getBytes(0, length), body:length(), most)
  if fault then
    refuse(handle, "400", "3", fault)
  end
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local may = headers:get("x-serin-may") -- the models that the client's key is for, from keys.lua; nil: all
  if may ~= nil then
    headers:remove("x-serin-may")
  end
  local authorization = headers:get("authorization")
  if authorization ~= nil and authorization:find("serin_", 1, true) then
    headers:remove("authorization") -- a key, although none is asked for: it is nobody else's business
  end
  if headers:get("content-encoding") ~= nil then
    refuse(handle, "415", "12", "compressed requests are not accepted; send the body as it is")
    return
  end
  local path = headers:get(":path") or ""
  if not NAMED[path] then
    if path:find("^/v2/models/.*/infer$") or path:find("^/v2/models/.*/infer%?") then
      check_json(handle, headers:get("inference-header-content-length"))
    end
    return
  end
  local body = handle:body()
  if body == nil or body:length() < FRAME_BYTES then
    refuse(handle, "400", "3", "the request carries no message")
    return
  end
  local bytes = body:getBytes(0, body:length())
  local flag, one, two, three, four = bytes:byte(1, FRAME_BYTES)
  if flag ~= 0 then
    refuse(handle, "415", "12", "compressed messages are not accepted; call without compression")
    return
  end
  if ((one * 256 + two) * 256 + three) * 256 + four ~= #bytes - FRAME_BYTES then
    refuse(handle, "400", "3", "the request's body must be exactly one message")
    return
  end
  local fault, model, version = message_fault(bytes, FRAME_BYTES + 1, path == INFER, #bytes)
  if fault then
    refuse(handle, "400", "3", fault)
    return
  end
  local is_model = #model <= 63 and model:find("^[a-z][a-z0-9-]*$")
  if may ~= nil and not (is_model and may:find("," .. model .. ",", 1, true)) then
    refuse(handle, "403", "7", "this key may not ask for this model")
    return
  end
  headers = handle:headers() -- the first one is void: waiting for the body was a pause
  if is_model then
    headers:add("x-serin-model", model)
  end
  if version ~= "" then
    headers:add("x-serin-version", version:find("^[1-9][0-9]*$") and version or "none")
  end
end
