-- Triton answers "internal error" to requests it cannot read. That is the client's fault: it must not be tried again on
-- another release, nor count against the one that said so.

local CLIENTS_FAULT = {
  '^{"error":"Unable to parse ',
  '^{"error":"failed to parse the request JSON',
  '^{"error":"failed to get ',
  '^{"error":"attempt to ',
}

function envoy_on_response(handle)
  local headers = handle:headers()
  if headers:get("grpc-status") == "13" and headers:get("grpc-message") == "Unable to parse request" then
    headers:replace("grpc-status", "3")
  end
  if headers:get(":status") ~= "500" then
    return
  end
  local body = handle:body()
  if body == nil then
    return
  end
  local text = body:getBytes(0, math.min(body:length(), 64))
  for _, pattern in ipairs(CLIENTS_FAULT) do
    if text:find(pattern) then
      handle:headers():replace(":status", "400")
    end
  end
end
