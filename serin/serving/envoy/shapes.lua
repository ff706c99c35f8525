-- What ends Triton 2.51 before it looks at a single value, refused here. It takes memory for as many elements as a shape
-- claims: so no shape may claim more elements than its request has bytes. It calls itself for every bracket inside a
-- bracket: so JSON may be nested only as deep as tensors are.

local MAX_DEPTH = 32
local HARMLESS_BYTES = 4096 -- so few brackets Triton survives, however they are nested
local TOO_LARGE = "an input's shape claims more elements than the request can hold"
local TOO_DEEP = "the request's JSON is nested too deeply"
local TOO_LONG = "a text in the request is too long; at most %d bytes are taken"
local QUOTE, BACKSLASH, OPEN, CLOSE, OPEN_BRACE, CLOSE_BRACE = 34, 92, 91, 93, 123, 125

local function grown(count, size, limit)
  if size < 0 or size > limit or count * size > limit then
    return nil
  end
  return count * size
end

-- What is wrong with brackets outside of strings, which may be MAX_DEPTH deep, or with the length of a string: `most`
-- bytes, each of which may be written as six. A text of many megabytes would keep everybody waiting until it is refused.
local function long_fault(text, most)
  local depth, at, last = 0, 1, #text
  local byte = string.byte
  while at <= last do
    local now = byte(text, at)
    if now == QUOTE then
      at = at + 1
      now = byte(text, at)
      local stop = math.min(last, at + 6 * most)
      while now ~= QUOTE and at <= stop do
        at = at + (now == BACKSLASH and 2 or 1)
        now = byte(text, at)
      end
      if at > stop and stop < last then
        return TOO_LONG:format(most)
      end
    elseif now == OPEN or now == OPEN_BRACE then
      depth = depth + 1
      if depth > MAX_DEPTH then
        return TOO_DEEP
      end
    elseif now == CLOSE or now == CLOSE_BRACE then
      depth = depth - 1
    end
    at = at + 1
  end
  return nil
end

-- "sh\u0061pe" would not be found as a shape. No encoder writes plain letters so.
local function hides_letters(text)
  local at = text:find("\\u00", 1, true)
  while at ~= nil do
    local first = at
    while text:byte(first - 1) == BACKSLASH do
      first = first - 1
    end
    if (at - first) % 2 == 0 and text:find("^[67]", at + 4) then
      return true
    end
    at = text:find("\\u00", at + 1, true)
  end
  return false
end

-- nil when a JSON text can be read without harm, else what is wrong with it. `most` bytes are in one string.
local function json_fault(text, limit, most)
  local fault = #text > HARMLESS_BYTES and long_fault(text, most)
  if fault then
    return fault
  end
  if hides_letters(text) then
    return "plain letters must not be written as \\u escapes"
  end
  local stop, _ = 0, nil
  while true do
    _, stop = text:find('"shape"', stop + 1, true)
    if stop == nil then
      return nil
    end
    local count = 1
    local rows, width = text:match("^: ?%[(%d+), ?(%d+)%]", stop + 1) -- as nearly all are written, and quickly read
    local sizes = rows == nil and text:match("^%s*:%s*%[([^%]]*)", stop + 1) or ""
    if rows ~= nil and (tonumber(rows) > limit or not grown(tonumber(rows), tonumber(width), limit)) then
      return TOO_LARGE
    end
    for size in sizes:gmatch("[^,]+") do
      count = grown(count, tonumber(size) or 1, limit) -- what is no number Triton refuses by itself
      if count == nil then
        return TOO_LARGE
      end
    end
  end
end
