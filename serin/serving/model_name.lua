-- Reads the model's name (and version) out of a gRPC message into headers, because the router cannot look into a body.
-- Headers of these names belong to the gateway: what a client sets is removed first.

local NAMED = {
  ["/inference.GRPCInferenceService/ModelInfer"] = true,
  ["/inference.GRPCInferenceService/ModelReady"] = true,
  ["/inference.GRPCInferenceService/ModelMetadata"] = true,
}
local LOOK_BYTES = 512 -- the name and the version are the first two fields and short

local function varint(bytes, at)
  local value, factor = 0, 1
  for place = at, math.min(at + 9, #bytes) do
    local byte = bytes:byte(place)
    value = value + (byte % 128) * factor
    if byte < 128 then
      return value, place + 1
    end
    factor = factor * 128
  end
  return nil, at
end

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

function envoy_on_request(handle)
  local headers = handle:headers()
  local may = headers:get("x-serin-may") -- the models that the client's key is for, from keys.lua; nil: all
  local ours = {}
  for name in pairs(headers) do
    if name:sub(1, 8) == "x-serin-" or name:sub(1, 8) == "x-envoy-" then
      ours[#ours + 1] = name
    end
  end
  for _, name in ipairs(ours) do
    headers:remove(name)
  end
  if headers:get("content-encoding") ~= nil then
    refuse(handle, "415", "12", "compressed requests are not accepted; send the body as it is")
    return
  end
  if not NAMED[headers:get(":path")] then
    return
  end
  local body = handle:body()
  if body == nil or body:length() < 5 then
    refuse(handle, "400", "3", "the request carries no message")
    return
  end
  local bytes = body:getBytes(0, math.min(body:length(), LOOK_BYTES))
  if bytes:byte(1) ~= 0 then
    refuse(handle, "415", "12", "compressed messages are not accepted; call without compression")
    return
  end
  local model, version = name_and_version(bytes)
  if may ~= nil and not may:find("," .. model .. ",", 1, true) then
    refuse(handle, "403", "7", "this key may not ask for this model")
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
