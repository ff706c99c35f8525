-- Triton answers 500 when a client's JSON cannot be read. That is the client's fault: it must not be tried again on
-- another release, nor count against the one that said so.

local CLIENTS_FAULT = {"^{\"error\":\"Unable to parse ", "^{\"error\":\"failed to parse the request JSON"}

function envoy_on_response(handle)
  if handle:headers():get(":status") ~= "500" then
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
