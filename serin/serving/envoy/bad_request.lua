-- Triton answers some requests that it cannot read with 500. That is the client's fault: such a request must not be tried
-- again on another release, nor count against the one that said so. Everything else with 500 is the server's failure,
-- also a model's that says something alike: Triton sends what it says of a request as JSON, and a model's error, which it
-- only passes on, as plain text. So both must fit, the type and the words.

local SAID_OF_A_REQUEST = { -- the words of Triton's own parser
  '^{"error":"failed to parse the request JSON buffer: ',
  '^{"error":"failed to get request params%.: attempt to get members ',
  '^{"error":"Unable to parse JSON bytes array: attempt to access ',
  "^{\"error\":\"Unable to parse 'data': Shape does not match true shape of 'data' field\"}",
  "^{\"error\":\"Unable to %l+ '[%l_]+': attempt to access ",
  '^{"error":"attempt to access ',
}
local LOOK_BYTES = 128 -- as long as the longest of them

function envoy_on_response(handle)
  if handle:headers():get("content-type") ~= "application/json" then
    return
  end
  local body = handle:body()
  if body == nil then
    return
  end
  local text = body:getBytes(0, math.min(body:length(), LOOK_BYTES))
  for _, pattern in ipairs(SAID_OF_A_REQUEST) do
    if text:find(pattern) then
      handle:headers():replace(":status", "400")
      return
    end
  end
end
