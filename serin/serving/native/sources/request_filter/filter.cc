// Reads a request before Envoy's router does: the model's name (and version) in a gRPC message become headers, and
// requests that would end Triton are refused (faults.h, message.h). Nulls in JSON are written out (json_data.h). It also
// removes headers that a client must not set, answers requests that keys.lua has refused and records requests with their
// answers (recording.h): one filter is cheaper than one for each. Envoy loads this as a dynamic module.
//
// Where the route asks for it, another process adds columns to the request: the windows over past events. That counts the
// request as an event, so it is done by a second filter of the name `windows` behind the rate limits.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "envoy_api.h"
#include "headers.h"
#include "json_data.h"
#include "message.h"
#include "recording.h"

namespace serin {
namespace {

constexpr Text kService = "/inference.GRPCInferenceService/";
constexpr Text kModels = "/v2/models/";
constexpr Text kInfer = "/infer";
constexpr size_t kNameBytes = 63;
constexpr Text kWindows = "windows";  // the cluster that adds columns, the filter that asks it, the key of its routes
constexpr uint64_t kWindowsMs = 2000;

enum class Call { kOther, kJson, kNamed, kMessage, kRefused };  // kMessage: one that carries tensors

struct Request {
  Request(const Rings* known, bool second) : rings(known), adds_windows(second) {}

  const Rings* rings;  // none: nothing is recorded
  const bool adds_windows;  // this is the filter behind the rate limits
  Call call = Call::kOther;
  Protocol protocol = kHttp;
  bool waiting = false;  // for its windows: nothing of it goes on
  bool guarded = false;  // by a key that is for some models only: `may`, from keys.lua
  std::string may;
  std::unique_ptr<Recording> recording;
};

using SharedRings = std::shared_ptr<const Rings>;

struct Config {
  SharedRings rings;
  bool adds_windows;
};

// The rings of this process. Every listener has a filter of its own, and a listener may be replaced; they share rings.
SharedRings open_rings(const std::string& settings) {
  static std::map<std::string, std::weak_ptr<const Rings>> known;  // Envoy's main thread alone comes here
  size_t space = settings.find(' '), bytes = 0;
  if (space == std::string::npos || !read_length(Text(settings).substr(0, space), SIZE_MAX / 16, bytes)) return nullptr;
  SharedRings rings = known[settings].lock();
  if (rings == nullptr) {
    rings = std::make_shared<Rings>(settings.substr(space + 1), bytes, envoy_dynamic_module_callback_get_concurrency());
    known[settings] = rings;
  }
  return rings;
}

void refuse(Stream stream, uint32_t status, Text grpc_status, Text text) {
  constexpr Text kKey = "grpc-status", kAsk = "www-authenticate", kBearer = "Bearer";
  Header headers[] = {{kKey.data(), kKey.size(), grpc_status.data(), grpc_status.size()},
                      {kAsk.data(), kAsk.size(), kBearer.data(), kBearer.size()}};
  size_t count = status == 401 ? 2 : 1;
  envoy_dynamic_module_callback_http_send_response(stream, status, headers, count, span(text), span("refused_request"));
}

// Answers what keys.lua has refused: a status, a status of gRPC and a text, with spaces between them.
void refuse_as_told(Stream stream) {
  std::string told = header(stream, kRefusedHeader);
  size_t first = told.find(' '), second = told.find(' ', first + 1);
  if (first == std::string::npos || second == std::string::npos) {
    refuse(stream, 503, "14", "the key could not be checked");
    return;
  }
  Text text(told);
  uint32_t status = static_cast<uint32_t>(std::atoi(told.c_str()));
  refuse(stream, status, text.substr(first + 1, second - first - 1), text.substr(second + 1));
}

Call call_of(Text path) {
  if (path.substr(0, kService.size()) == kService) {
    Text method = path.substr(kService.size());
    if (method == "ModelInfer") return Call::kMessage;
    return method == "ModelReady" || method == "ModelMetadata" ? Call::kNamed : Call::kOther;
  }
  if (path.substr(0, kModels.size()) != kModels) return Call::kOther;
  Text rest = path.substr(kModels.size());
  bool ends = rest.size() >= kInfer.size() && rest.substr(rest.size() - kInfer.size()) == kInfer;
  return ends || rest.find("/infer?") != Text::npos ? Call::kJson : Call::kOther;
}

// The body as it came, in pieces that Envoy keeps until the end of the call.
class Body {
 public:
  Body(Stream stream, bool arriving) : stream_(stream), arriving_(arriving) {
    whole_ = arriving && envoy_dynamic_module_callback_http_received_buffered_request_body(stream);
    if (!whole_) take(stream, kBufferedRequest);
    if (arriving) take(stream, kReceivedRequest);
    for (const Span& piece : pieces_) size_ += piece.size;
  }

  size_t size() const { return size_; }

  // Its first `length` bytes in one piece.
  Text first(size_t length) {
    if (!pieces_.empty() && pieces_[0].size >= length) return Text(pieces_[0].data, length);
    if (!joined_.empty() && joined_.size() == length) return joined_;
    joined_.clear();
    joined_.reserve(length);
    for (const Span& piece : pieces_) joined_.append(piece.data, std::min(piece.size, length - joined_.size()));
    return joined_;
  }

  // All of it; nothing is asked for afterwards.
  std::string release() {
    Text all = first(size_);
    return all.data() == joined_.data() ? std::move(joined_) : std::string(all);
  }

  // Puts another body in its place; all texts of the old one end.
  void replace(std::string with) {
    if (arriving_ && !whole_) drain(kBufferedRequest);
    BodyKind last = arriving_ ? kReceivedRequest : kBufferedRequest;
    drain(last);
    envoy_dynamic_module_callback_http_append_body(stream_, last, span(with));
    set_header(stream_, "content-length", std::to_string(with.size()));
    pieces_.clear();
    size_ = with.size();
    joined_ = std::move(with);
  }

 private:
  void drain(BodyKind kind) {
    size_t size = envoy_dynamic_module_callback_http_get_body_size(stream_, kind);
    if (size > 0) envoy_dynamic_module_callback_http_drain_body(stream_, kind, size);
  }

  void take(Stream stream, BodyKind kind) {
    size_t count = envoy_dynamic_module_callback_http_get_body_chunks_size(stream, kind);
    if (count == 0) return;
    std::vector<Span> found(count);
    if (!envoy_dynamic_module_callback_http_get_body_chunks(stream, kind, found.data())) return;
    pieces_.insert(pieces_.end(), found.begin(), found.end());
  }

  Stream stream_;
  bool arriving_, whole_;
  std::vector<Span> pieces_;
  size_t size_ = 0;
  std::string joined_;
};

// Writes out what JSON lacks where the route asks for it: `max_written_bytes`. Returns why the request is refused, or "".
std::string rewrite_json(Stream stream, Body& body, size_t length, bool binary) {
  double most = 0;
  if (!envoy_dynamic_module_callback_http_get_metadata_number(stream, kRoute, span("model_name"),
                                                              span("max_written_bytes"), &most)) {
    return "";
  }
  Text all = body.first(body.size());
  DataRewriter data(all.substr(0, length), static_cast<size_t>(most));
  if (!data.rewrite()) return data.fault;
  size_t json_bytes = data.result.size();
  body.replace(std::move(data.result.append(all.substr(length))));
  if (binary) set_header(stream, kJsonBytesHeader, std::to_string(json_bytes));
  return "";
}

// Binary tensors follow a JSON text whose length a header tells; without it all is JSON.
bool accept_json(Stream stream, Body& body) {
  size_t told = 0;
  std::string json_bytes = header(stream, kJsonBytesHeader, &told);
  size_t length = body.size();
  if (told > 0 && (!read_length(json_bytes, body.size(), length) || length > body.size())) {
    refuse(stream, 400, "3", "inference-header-content-length is no length of a part of this request");
    return false;
  }
  size_t most = body.size();
  double known = 0;
  if (length > kHarmlessBytes &&  // in less nothing is long; the route knows its model
      envoy_dynamic_module_callback_http_get_metadata_number(stream, kRoute, span("model_name"),
                                                             span("max_text_bytes"), &known)) {
    most = static_cast<size_t>(known);
  }
  std::string fault = json_fault(body.first(length), body.size(), most);
  if (fault.empty()) fault = rewrite_json(stream, body, length, told > 0);
  if (fault.empty()) return true;
  refuse(stream, 400, "3", fault);
  return false;
}

bool is_name(Text text) {
  if (text.empty() || text.size() > kNameBytes || text[0] < 'a' || text[0] > 'z') return false;
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  });
}

bool is_number(Text text) {
  return text[0] >= '1' && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// The message of a body that is one frame: a flag, the length in four bytes, and so many bytes. False: refused.
bool read_frame(Stream stream, Text frame, Text& message) {
  if (frame.size() < kFrameBytes) {
    refuse(stream, 400, "3", "the request carries no message");
    return false;
  }
  if (frame[0] != 0) {
    refuse(stream, 415, "12", "compressed messages are not accepted; call without compression");
    return false;
  }
  message = frame.substr(kFrameBytes);
  uint64_t length = 0;
  for (size_t at = 1; at < kFrameBytes; ++at) length = length << 8 | static_cast<unsigned char>(frame[at]);
  if (length == message.size()) return true;
  refuse(stream, 400, "3", "the request's body must be exactly one message");
  return false;
}

// Whether a model is among ",those,": by its name, or by the beginning of it with a * behind (as in keys.lua).
bool among(const std::string& models, Text model) {
  const std::string name = "," + std::string(model);
  if (models.find(name + ",") != std::string::npos) return true;
  for (size_t length = 1; length <= name.size(); ++length) {
    if (models.find(name.substr(0, length) + "*,") != std::string::npos) return true;
  }
  return false;
}

bool accept_message(Stream stream, const Request& request, Body& body) {
  Text frame = body.first(body.size()), message;
  if (!read_frame(stream, frame, message)) return false;
  Named named;
  std::string fault = message_fault(message, request.call == Call::kMessage, frame.size(), named);
  if (!fault.empty()) {
    refuse(stream, 400, "3", fault);
    return false;
  }
  bool is_model = is_name(named.model);
  if (request.guarded && !(is_model && among(request.may, named.model))) {
    refuse(stream, 403, "7", "this key may not ask for this model");
    return false;
  }
  if (is_model) add_header(stream, "x-serin-model", named.model);
  if (!named.version.empty()) {
    add_header(stream, "x-serin-version", is_number(named.version) ? named.version : "none");
  }
  envoy_dynamic_module_callback_http_clear_route_cache(stream);
  envoy_dynamic_module_callback_get_most_specific_route_config(stream);  // finds the route, whose metadata is read next
  return true;
}

void refuse_without_windows(Stream stream) {
  refuse(stream, 503, "14", "the windows of this request cannot be computed now; send it again");
}

bool needs_windows(Stream stream) {
  double asked = 0;
  return metadata_number(stream, kFilterSpace, kWindows, asked);
}

// Sends the body to the process that adds windows over past events.
void ask_for_windows(Stream stream, Protocol protocol, Body& body) {
  std::string model(metadata_text(stream, kRoute, "model")), json_bytes = header(stream, kJsonBytesHeader);
  auto pair = [](Text key, Text value) { return Header{key.data(), key.size(), value.data(), value.size()}; };
  std::vector<Header> headers{pair(":method", "POST"), pair(":path", protocol == kGrpc ? "/grpc" : "/http"),
                              pair(":authority", kWindows), pair("x-serin-model", model)};
  if (!json_bytes.empty()) headers.push_back(pair(kJsonBytesHeader, json_bytes));
  uint64_t id = 0;
  int begun = envoy_dynamic_module_callback_http_filter_http_callout(
      stream, &id, span(kWindows), headers.data(), headers.size(), span(body.first(body.size())), kWindowsMs);
  if (begun != 0) refuse_without_windows(stream);
}

// Whether a request goes on now: it may be refused, or wait for its windows (on_windows).
bool accept(Stream stream, Request& request, bool arriving) {
  if (request.call == Call::kRefused) {
    refuse_as_told(stream);
    return false;
  }
  Body body(stream, arriving);
  bool json = request.call == Call::kJson;
  request.protocol = json ? kHttp : kGrpc;
  if (request.adds_windows) {
    request.waiting = true;
    ask_for_windows(stream, request.protocol, body);
    return false;
  }
  if (!(json ? accept_json(stream, body) : accept_message(stream, request, body))) return false;
  if (request.call == Call::kNamed || needs_windows(stream)) return true;  // the second filter records the latter
  request.recording = Recording::draw(stream, request.rings, request.protocol, body);
  return true;
}

// The answer to ask_for_windows: the body that goes on, or why the request is refused.
void on_windows(Stream stream, Request& request, bool done, const std::vector<Header>& headers, std::string answer) {
  request.waiting = false;
  Text status, json_bytes;
  for (const Header& each : headers) {
    Text key(each.key, each.key_size), value(each.value, each.value_size);
    if (key == ":status") status = value;
    if (key == kJsonBytesHeader) json_bytes = value;
  }
  if (!done || status.empty() || status[0] == '5') return refuse_without_windows(stream);
  if (status != "200") return refuse(stream, 400, "3", answer);
  Body body(stream, false);
  body.replace(std::move(answer));
  if (!json_bytes.empty()) set_header(stream, kJsonBytesHeader, json_bytes);
  request.recording = Recording::draw(stream, request.rings, request.protocol, body);
  envoy_dynamic_module_callback_http_filter_continue_decoding(stream);
}

// Whether the whole body came with the headers: the buffer before this filter has waited for it.
bool is_there(Stream stream, Text content_length) {
  size_t size = envoy_dynamic_module_callback_http_get_body_size(stream, kBufferedRequest), told = 0;
  return read_length(content_length, size, told) && told == size;
}

HeadersStatus on_headers_again(Stream stream, Request& request, bool last) {
  Seen seen(stream);
  request.call = call_of(seen.path());
  bool tensors = request.call == Call::kJson || request.call == Call::kMessage;
  if (last || !tensors || !needs_windows(stream)) {
    request.call = Call::kOther;
    return kHeadersContinue;
  }
  if (is_there(stream, seen.content_length())) {
    accept(stream, request, false);
    request.call = Call::kOther;  // nothing more to look at
  }
  return kHeadersStop;
}

HeadersStatus on_headers(Stream stream, Request& request, bool last) {
  if (request.adds_windows) return on_headers_again(stream, request, last);
  Seen seen(stream);
  bool whole = is_there(stream, seen.content_length());  // before headers change: these views end then
  request.call = seen.refused() ? Call::kRefused : call_of(seen.path());
  request.guarded = seen.guarded();
  if (request.guarded) request.may = header(stream, kMayHeader);
  seen.remove_odd_ones(stream);
  if (request.call == Call::kRefused) {
    if (last) refuse_as_told(stream);
    return kHeadersStop;  // an answer before the end of the body would reset an HTTP/2 stream
  }
  if (seen.compressed()) {
    refuse(stream, 415, "12", "compressed requests are not accepted; send the body as it is");
    return kHeadersStop;
  }
  if (request.call == Call::kOther || (last && request.call == Call::kJson)) return kHeadersContinue;
  if (last) {
    refuse(stream, 400, "3", "the request carries no message");
    return kHeadersStop;
  }
  if (!whole) return kHeadersStop;
  bool accepted = accept(stream, request, false);
  request.call = Call::kOther;  // nothing more to look at
  return accepted ? kHeadersContinue : kHeadersStop;
}

Request& known(const void* request) { return *static_cast<Request*>(const_cast<void*>(request)); }

}  // namespace
}  // namespace serin

#pragma GCC visibility push(default)
extern "C" {

using serin::Config, serin::Request;

const char* envoy_dynamic_module_on_program_init() { return "v0.2.0"; }

// `settings`: how many bytes a ring has and the folder of the rings, with a space between them; else nothing is recorded.
const void* envoy_dynamic_module_on_http_filter_config_new(void*, Span name, Span settings) {
  bool adds_windows = serin::Text(name.data, name.size) == serin::kWindows;
  return new Config{serin::open_rings(std::string(settings.data, settings.size)), adds_windows};
}

void envoy_dynamic_module_on_http_filter_config_destroy(const void* config) { delete static_cast<const Config*>(config); }

const void* envoy_dynamic_module_on_http_filter_new(const void* config, Stream) {
  const Config& known = *static_cast<const Config*>(config);
  return new Request(known.rings.get(), known.adds_windows);
}

void envoy_dynamic_module_on_http_filter_destroy(const void* request) { delete static_cast<const Request*>(request); }

HeadersStatus envoy_dynamic_module_on_http_filter_request_headers(Stream stream, const void* request, bool last) {
  return serin::on_headers(stream, serin::known(request), last);
}

BodyStatus envoy_dynamic_module_on_http_filter_request_body(Stream stream, const void* request, bool last) {
  Request& known = serin::known(request);
  if (known.waiting) return kBodyStopAndBuffer;
  if (known.call == serin::Call::kOther) return kBodyContinue;
  return last && serin::accept(stream, known, true) ? kBodyContinue : kBodyStopAndBuffer;
}

TrailersStatus envoy_dynamic_module_on_http_filter_request_trailers(Stream stream, const void* request) {
  Request& known = serin::known(request);
  if (known.waiting) return kTrailersStop;
  bool accepted = known.call == serin::Call::kOther || serin::accept(stream, known, false);
  return accepted ? kTrailersContinue : kTrailersStop;
}

HeadersStatus envoy_dynamic_module_on_http_filter_response_headers(Stream stream, const void* request, bool last) {
  Request& known = serin::known(request);
  if (known.recording && !known.recording->on_headers(stream, last)) known.recording.reset();
  return kHeadersContinue;
}

BodyStatus envoy_dynamic_module_on_http_filter_response_body(Stream stream, const void* request, bool last) {
  Request& known = serin::known(request);
  if (known.recording) known.recording->on_body(stream, last);
  return kBodyContinue;
}

TrailersStatus envoy_dynamic_module_on_http_filter_response_trailers(Stream stream, const void* request) {
  Request& known = serin::known(request);
  if (known.recording) known.recording->on_trailers(stream);
  return kTrailersContinue;
}

void envoy_dynamic_module_on_http_filter_stream_complete(Stream stream, const void* request) {
  Request& known = serin::known(request);
  if (known.recording) known.recording->on_complete(stream);
}

void envoy_dynamic_module_on_http_filter_http_callout_done(Stream stream, const void* request, uint64_t, int result,
                                                           Header* headers, size_t count, Span* pieces, size_t parts) {
  std::string answer;
  for (size_t part = 0; part < parts; ++part) answer.append(pieces[part].data, pieces[part].size);
  std::vector<Header> found(headers, headers + (headers == nullptr ? 0 : count));
  serin::on_windows(stream, serin::known(request), result == kCalloutDone, found, std::move(answer));
}

// Envoy asks for these by name.
void envoy_dynamic_module_on_http_filter_downstream_below_write_buffer_low_watermark() {}
void envoy_dynamic_module_on_http_filter_downstream_above_write_buffer_high_watermark() {}
void envoy_dynamic_module_on_http_filter_scheduled() {}
void envoy_dynamic_module_on_http_filter_http_stream_reset() {}
void envoy_dynamic_module_on_http_filter_http_stream_complete() {}
void envoy_dynamic_module_on_http_filter_http_stream_trailers() {}
void envoy_dynamic_module_on_http_filter_http_stream_data() {}
void envoy_dynamic_module_on_http_filter_http_stream_headers() {}
}
#pragma GCC visibility pop
