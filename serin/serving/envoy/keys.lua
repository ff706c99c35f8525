-- Who may ask for which model. Set before this text: KEYS, sha256 of a key -> {name, till = time, models = ",those,",
-- wait = seconds after which one that was too fast may try again}; ISSUERS, name -> {models or claim, wait};
-- LIMIT, the longest body in bytes, and MOST, the longest of a refused request that is waited for; drain (drain.lua).
-- The key or token itself is nowhere but in the client's request, and it ends here: neither Triton nor a log gets it.

local bit = require("bit")
local band, bnot, bxor, ror, shift, tohex = bit.band, bit.bnot, bit.bxor, bit.ror, bit.rshift, bit.tohex

local KEY_BYTES = 49 -- one block of the hash: whatever else is sent costs nothing
local SERVICE = "/inference.GRPCInferenceService/"
local OPEN = { -- they tell whether the gateway lives, and nothing about models
  ["/v2/health/live"] = true,
  ["/v2/health/ready"] = true,
  [SERVICE .. "ServerLive"] = true,
  [SERVICE .. "ServerReady"] = true,
}
local ROUNDS = {
  0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
  0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
  0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
  0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
  0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
  0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
  0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
  0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
}

-- SHA-256 of KEY_BYTES bytes, which with the padding are exactly one block.
local function sha256(text)
  local block = text .. "\128" .. ("\0"):rep(64 - KEY_BYTES - 3) .. string.char(shift(KEY_BYTES * 8, 8), band(KEY_BYTES * 8, 255))
  local w = {}
  for i = 1, 16 do
    local one, two, three, four = block:byte(4 * i - 3, 4 * i)
    w[i] = bit.tobit(((one * 256 + two) * 256 + three) * 256 + four)
  end
  for i = 17, 64 do
    local x, y = w[i - 15], w[i - 2]
    local low = bxor(ror(x, 7), ror(x, 18), shift(x, 3))
    local high = bxor(ror(y, 17), ror(y, 19), shift(y, 10))
    w[i] = bit.tobit(w[i - 16] + low + w[i - 7] + high)
  end
  local start = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
  }
  local a, b, c, d, e, f, g, h = unpack(start)
  for i = 1, 64 do
    local sum = bxor(ror(e, 6), ror(e, 11), ror(e, 25))
    local one = bit.tobit(h + sum + bxor(band(e, f), band(bnot(e), g)) + ROUNDS[i] + w[i])
    local other = bxor(ror(a, 2), ror(a, 13), ror(a, 22)) + bxor(band(a, b), band(a, c), band(b, c))
    h, g, f, e, d, c, b, a = g, f, e, bit.tobit(d + one), c, b, a, bit.tobit(one + other)
  end
  local words = {}
  for i, value in ipairs({a, b, c, d, e, f, g, h}) do
    words[i] = tohex(bit.tobit(start[i] + value))
  end
  return table.concat(words)
end

local TOKENS = "envoy.filters.http.jwt_authn" -- what Envoy has verified, by the issuer's name
local OTHER_ISSUER = "Jwt issuer is not configured"
local CALLER_BYTES = 128

-- The models that a claim names, ",those,": a list of strings, or one string with spaces or commas. nil: all.
local function named(claim)
  local found = {}
  local words = type(claim) == "table" and claim or {}
  if type(claim) == "string" then
    for word in claim:gmatch("[^%s,]+") do
      words[#words + 1] = word
    end
  end
  for _, word in ipairs(words) do
    if word == "*" then
      return nil
    elseif type(word) == "string" and #word <= 63 and word:find("^%l[%l%d-]*$") then
      found[#found + 1] = word
    end
  end
  return "," .. table.concat(found, ",") .. ","
end

-- The entry of a token that Envoy has verified; else nil and why not.
local function verified(handle)
  local payloads = handle:streamInfo():dynamicMetadata():get(TOKENS) or {}
  local reason = "its issuer is not known here"
  for name, issuer in pairs(ISSUERS) do
    local payload = payloads[name]
    if payload ~= nil then
      local subject = payload.sub or payload.azp or payload.client_id -- tokens of a program may have no subject
      local caller = (name .. ":" .. (type(subject) == "string" and subject or "")):sub(1, CALLER_BYTES)
      local entry = {name = caller, issuer = name, wait = issuer.wait}
      entry.models = issuer.models
      if issuer.claim ~= nil then
        entry.models = named(payload[issuer.claim])
      end
      return entry
    end
    local failed = payloads[name .. " failed"]
    if failed ~= nil and failed.message ~= OTHER_ISSUER then
      reason = tostring(failed.message)
    end
  end
  return nil, "this token is not valid: " .. reason
end

local seen = {} -- entries by key, so that one is hashed once. Good keys only: their number is bounded

-- The entry of a key or token that is good now; else nil and why not.
local function known(handle, header)
  local key = header and header:match("^[Bb]earer +(%S+)$")
  if key == nil then
    return nil, "a key is needed: send the header 'authorization: Bearer <key>'"
  elseif next(ISSUERS) ~= nil and key:find("^[%w_-]+%.[%w_-]+%.[%w_-]*$") then
    return verified(handle)
  end
  local entry = seen[key] or #key == KEY_BYTES and KEYS[sha256(key)] or nil
  if entry == nil then
    return nil, "this key is not known here, or was revoked"
  end
  seen[key] = entry
  if entry.till ~= nil and os.time() >= entry.till then
    return nil, "this key has expired"
  end
  return entry
end

-- Whether a model is among ",those,": by its name, or by the beginning of it with a * behind.
local function among(models, model)
  if models:find("," .. model .. ",", 1, true) then
    return true
  end
  for length = 0, #model do
    if models:find("," .. model:sub(1, length) .. "*,", 1, true) then
      return true
    end
  end
  return false
end

-- Calls that carry one message, which comes at once. Others may be streams, whose client waits for an answer.
local UNARY = {
  [SERVICE .. "ModelInfer"] = true,
  [SERVICE .. "ModelReady"] = true,
  [SERVICE .. "ModelMetadata"] = true,
}

-- Whether nobody is to wait for the end of the request before it is refused.
local function at_once(headers, path)
  local length = tonumber(headers:get("content-length") or "")
  if length ~= nil and length > MOST then
    return true
  end
  local kind = headers:get("content-type") or ""
  return kind:sub(1, 16) == "application/grpc" and not UNARY[path]
end

-- refuse.lua answers when the body has come. The path leads nowhere from here on, whatever may fail behind this.
local function refuse(handle, path, status, grpc, text)
  local headers = handle:headers()
  headers:replace(":path", "/")
  headers:add("x-envoy-original-path", path) -- for the log
  local length = tonumber(headers:get("content-length") or "")
  if length ~= nil and length > LIMIT then
    status, grpc, text = "413", "8", "Payload Too Large"
  end
  headers:add("x-serin-refused", status .. " " .. grpc .. " " .. text)
  if at_once(headers, path) then
    local answer = {[":status"] = status, ["grpc-status"] = grpc}
    if status == "401" then
      answer["www-authenticate"] = "Bearer"
    end
    handle:respond(answer, text)
  end
  drain(handle)
end

-- For the logs, and for the rate limits (rates.py).
local function describe(handle, entry)
  local facts = handle:streamInfo():dynamicMetadata()
  facts:set("serin", "caller", entry.name)
  if entry.wait ~= nil then
    facts:set("serin", "wait", entry.wait)
    if entry.issuer ~= nil then
      facts:set("serin", "issuer", entry.issuer)
    end
  end
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local authorization = headers:get("authorization") -- Envoy joins several with commas: then it is none
  headers:remove("authorization")
  local path = headers:get(":path") or ""
  if OPEN[path] then
    return
  end
  -- A script that fails lets the request pass: so whatever may fail is caught.
  local ran, entry, reason = pcall(known, handle, authorization)
  if not ran then
    handle:logErr("the key could not be checked: " .. tostring(entry))
    refuse(handle, path, "503", "14", "the key could not be checked")
    return
  elseif entry == nil then
    refuse(handle, path, "401", "16", reason)
    return
  end
  describe(handle, entry)
  if entry.models ~= nil then -- nil: all
    local model = path:match("^/v2/models/([^/?]+)")
    if model ~= nil and not among(entry.models, model) then
      local what = entry.issuer == nil and "key" or "token"
      refuse(handle, path, "403", "7", "this " .. what .. " may not ask for this model")
    elseif path:sub(1, #SERVICE) == SERVICE then
      headers:add("x-serin-may", entry.models) -- for the request filter: the model is named in the message
    end
  end
end
