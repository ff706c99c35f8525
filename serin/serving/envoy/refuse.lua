-- Answers what keys.lua has refused, once the whole body has come: an answer before that makes Envoy reset the HTTP/2
-- stream, which some clients report instead of the answer. keys.lua has emptied the body, so nothing is held here.

function envoy_on_request(handle)
  local refused = handle:headers():get("x-serin-refused")
  if refused == nil then
    return
  end
  local status, grpc, text = refused:match("^(%d+) (%d+) (.*)$")
  handle:body()
  local headers = {[":status"] = status, ["grpc-status"] = grpc}
  if status == "401" then
    headers["www-authenticate"] = "Bearer"
  end
  handle:respond(headers, text)
end
