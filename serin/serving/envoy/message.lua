-- Reads the messages of gRPC that name a model, exactly as protobuf does, or refuses them: native/sources/request_filter/message.h says
-- what is refused and why, and does the same where it was compiled. shapes.lua comes before this text.

local UNREADABLE = "the message cannot be read"
local NUMBER, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5 -- how a field is written

-- What a field is, and how it may be written. A message is a list of its fields, by number.
local WIRES = {
  nothing = {[NUMBER] = true, [EIGHT_BYTES] = true, [LENGTH] = true, [FOUR_BYTES] = true},
  text = {[LENGTH] = true},
  varint = {[NUMBER] = true},
  double = {[EIGHT_BYTES] = true},
  message = {[LENGTH] = true},
  messages = {[LENGTH] = true},
  blobs = {[LENGTH] = true},
  varints = {[NUMBER] = true, [LENGTH] = true},
  floats = {[FOUR_BYTES] = true, [LENGTH] = true},
  doubles = {[EIGHT_BYTES] = true, [LENGTH] = true},
}
local ONCE = {text = true, varint = true, double = true, message = true}

local function field(kind, inner)
  return {kind = kind, wires = WIRES[kind], once = ONCE[kind], inner = inner}
end

local NOTHING, TEXT, VARINT, VARINTS = field("nothing"), field("text"), field("varint"), field("varints")
local NAMES = {TEXT, TEXT}
local PARAMETER = {VARINT, VARINT, TEXT, field("double"), VARINT}
local ENTRY = {TEXT, field("message", PARAMETER)}
local CONTENTS = {VARINTS, VARINTS, VARINTS, VARINTS, VARINTS, field("floats"), field("doubles"), field("blobs")}
local INPUT = {TEXT, TEXT, VARINTS, field("messages", ENTRY), field("message", CONTENTS)}
local OUTPUT = {TEXT, field("messages", ENTRY)}
local REQUEST = {TEXT, TEXT, TEXT, field("messages", ENTRY), field("messages"), field("messages", OUTPUT), field("blobs")}

-- The number at a place, and the place behind it; nil when it has more than `longest` bytes, or ends behind `last`, or is
-- not below `limit`. One of ten bytes may be 2^64 here: its last byte tells.
local function varint(bytes, at, last, longest, limit)
  local value, factor = 0, 1
  for place = at, math.min(at + longest - 1, last) do
    local byte = bytes:byte(place)
    value = value + (byte % 128) * factor
    if byte < 128 then
      if value >= limit or place == at + 9 and byte > 1 then
        return nil, at
      end
      return value, place + 1
    end
    factor = factor * 128
  end
  return nil, at
end

local CONTINUED = ("[\128-\255]"):rep(9)
local TOO_LONG_VARINT, TOO_LARGE_VARINT = CONTINUED .. "[\128-\255]", CONTINUED .. "[\2-\127]"

local function are_varints(text)
  return text == ""
    or text:byte(-1) < 128 and not text:find(TOO_LONG_VARINT) and not text:find(TOO_LARGE_VARINT)
end

-- No character in more bytes than it needs, no surrogates, nothing above U+10FFFF.
local function is_utf8(text)
  local at = text:find("[\128-\255]")
  while at ~= nil do
    local first, second, third, fourth = text:byte(at, at + 3)
    local low, high = 128, 191
    if first == 224 then low = 160 elseif first == 237 then high = 159 end
    if first == 240 then low = 144 elseif first == 244 then high = 143 end
    if first < 194 or first > 244 or second == nil or second < low or second > high then
      return false
    end
    local size = first < 224 and 2 or first < 240 and 3 or 4
    if size >= 3 and (third == nil or third < 128 or third > 191) then
      return false
    end
    if size == 4 and (fourth == nil or fourth < 128 or fourth > 191) then
      return false
    end
    at = text:find("[\128-\255]", at + size)
  end
  return true
end

local read_message

local function is_readable(bytes, known, wire, from, to)
  local kind = known.kind
  if kind == "text" then
    return is_utf8(bytes:sub(from, to))
  elseif kind == "varints" then
    return wire == NUMBER or are_varints(bytes:sub(from, to))
  elseif kind == "floats" or kind == "doubles" then
    return (to - from + 1) % (kind == "floats" and 4 or 8) == 0
  elseif known.inner ~= nil then
    return read_message(bytes, from, to, known.inner)
  end
  return true
end

-- Calls visit(number, from, to) for each field before it is looked into; false when this is not such a message, or a
-- visit says so.
function read_message(bytes, at, last, known, visit)
  local seen = {}
  while at <= last do
    local tag, length
    tag, at = varint(bytes, at, last, 5, 2 ^ 32)
    if tag == nil or tag < 8 then
      return false
    end
    local number, wire, from = math.floor(tag / 8), tag % 8, at
    local found = known[number] or NOTHING
    if not found.wires[wire] or found.once and seen[number] then
      return false
    end
    if found.once then
      seen[number] = true
    end
    if wire == NUMBER then
      length, at = varint(bytes, at, last, 10, math.huge)
    elseif wire == LENGTH then
      length, from = varint(bytes, at, last, 5, 2 ^ 31)
      at = from + (length or 0)
    else
      length = wire == EIGHT_BYTES and 8 or 4
      at = at + length
    end
    if length == nil or at > last + 1 then
      return false
    end
    if visit and not visit(number, from, at - 1) or not is_readable(bytes, found, wire, from, at - 1) then
      return false
    end
  end
  return true
end

-- What is wrong with the message from a place on, or nil, the model and the version. `tensors`: whether it is a
-- ModelInferRequest; `limit`: the bytes of the whole request.
local function message_fault(bytes, at, tensors, limit)
  local fits, names, count = true, {"", ""}, 1
  local function in_input(number, from, to)
    while number == 3 and from <= to do
      local size
      size, from = varint(bytes, from, to, 10, math.huge)
      if size == nil then
        return false
      end
      count = count and grown(count, size, limit)
    end
    return true
  end
  local function in_request(number, from, to)
    if number <= 2 then
      names[number] = bytes:sub(from, to)
    end
    if not tensors or number ~= 5 then
      return true
    end
    count = 1
    local read = read_message(bytes, from, to, INPUT, in_input)
    fits = fits and count ~= nil
    return read
  end
  if not read_message(bytes, at, #bytes, tensors and REQUEST or NAMES, in_request) then
    return UNREADABLE
  end
  return not fits and TOO_LARGE or nil, names[1], names[2]
end
