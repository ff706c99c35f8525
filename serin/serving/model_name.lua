-- Looks into a request before the router does, which cannot: the model's name (and version) in a gRPC message become
-- headers, and shapes that no data can fill are refused (shapes.lua stands before this text).

local NAMED = {
  ["/inference.GRPCInferenceService/ModelInfer"] = true,
  ["/inference.GRPCInferenceService/ModelReady"] = true,
  ["/inference.GRPCInferenceService/ModelMetadata"] = true,
}
local INFER = "/inference.GRPCInferenceService/ModelInfer"
local LOOK_BYTES = 512 -- the name and the version are the first two fields and short

-- Fields 1 and 2 of ModelInferRequest, ModelReadyRequest and ModelMetadataRequest.
local function name_and_version(bytes)
  local found = {}
  local at = 6 -- behind the frame's flag and length
  while at <= #bytes do
    local tag, length
    tag, at = varint(bytes, at)
    if tag == nil or tag % 8 ~= 2 then
      break
    end
    length, at = varint(bytes, at)
    if length == nil or at + length - 1 > #bytes then
      break
    end
    found[math.floor(tag / 8)] = bytes:sub(at, at + length - 1)
    at = at + length
  end
  return found[1] or "", found[2] or ""
end

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
  if body == nil or body:length() < 5 then
    refuse(handle, "400", "3", "the request carries no message")
    return
  end
  local length = path == INFER and body:length() or math.min(body:length(), LOOK_BYTES)
  local bytes = body:getBytes(0, length)
  if bytes:byte(1) ~= 0 then
    refuse(handle, "415", "12", "compressed messages are not accepted; call without compression")
    return
  end
  local model, version = name_and_version(bytes)
  if may ~= nil and not may:find("," .. model .. ",", 1, true) then
    refuse(handle, "403", "7", "this key may not ask for this model")
    return
  end
  local fault = path == INFER and message_fault(bytes, #bytes)
  if fault then
    refuse(handle, "400", "3", fault)
    return
  end
  headers = handle:headers() -- the first one is void: waiting for the body was a pause
  if #model <= 63 and model:find("^[a-z][a-z0-9-]*$") then
    headers:add("x-serin-model", model)
  end
  if version ~= "" then
    headers:add("x-serin-version", version:find("^[1-9][0-9]*$") and version or "none")
  end
end
