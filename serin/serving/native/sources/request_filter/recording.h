// What one request leaves in the ring: its bytes as they were sent on, copied when it is drawn, and those of the answer,
// copied as they pass. It is written when the answer has been sent, whole and good; else it is forgotten. Nothing waits.

#pragma once

#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>

#include "headers.h"
#include "ring.h"

namespace serin {

constexpr Text kJsonBytesHeader = "inference-header-content-length";
constexpr Text kFilterSpace = "model_name";  // of a route's metadata for this filter
constexpr Text kLogSpace = "serin";          // of what the request log has, too
constexpr size_t kFrameBytes = 5;            // a gRPC message's flag and length

// murmur3-32 with seed 0, as serin/formats/serving/lots.py.
inline uint32_t lot(Text id) {
  auto rotate = [](uint32_t value, int by) { return (value << by) | (value >> (32 - by)); };
  auto scramble = [&](uint32_t word) { return rotate(word * 0xCC9E2D51u, 15) * 0x1B873593u; };
  uint32_t state = 0, word = 0;
  size_t at = 0;
  for (; at + 4 <= id.size(); at += 4) {
    std::memcpy(&word, id.data() + at, 4);
    state = rotate(state ^ scramble(word), 13) * 5 + 0xE6546B64u;
  }
  word = 0;
  std::memcpy(&word, id.data() + at, id.size() - at);
  state ^= scramble(word) ^ static_cast<uint32_t>(id.size());
  state = (state ^ (state >> 16)) * 0x85EBCA6Bu;
  state = (state ^ (state >> 13)) * 0xC2B2AE35u;
  return state ^ (state >> 16);
}

inline bool is_drawn(Text id, double share) { return share >= 1 || lot(id) < share * 4294967296.0; }

inline bool metadata_number(Stream stream, Text space, Text key, double& found) {
  return envoy_dynamic_module_callback_http_get_metadata_number(stream, kRoute, span(space), span(key), &found);
}

inline Text metadata_text(Stream stream, MetadataSource source, Text key) {
  Span found{nullptr, 0};
  bool there = envoy_dynamic_module_callback_http_get_metadata_string(stream, source, span(kLogSpace), span(key), &found);
  return there ? Text(found.data, found.size) : Text();
}

inline Text one_header(Stream stream, HeaderKind kind, Text key) {
  Span value{nullptr, 0};
  envoy_dynamic_module_callback_http_get_header(stream, kind, span(key), &value, 0, nullptr);
  return value.data == nullptr ? Text() : Text(value.data, value.size);
}

inline int number_of(Text text, int otherwise) {
  size_t found = 0;
  return read_length(text, 1 << 20, found) ? static_cast<int>(found) : otherwise;
}

inline Encoding encoding_of(Text name) {
  if (name.empty() || name == "identity") return kPlain;
  return name == "gzip" ? kGzip : name == "deflate" ? kDeflate : kUnknown;
}

class Recording {
 public:
  // Null when the request is not drawn: by the route's share, the largest of its releases'.
  template <typename Body>
  static std::unique_ptr<Recording> draw(Stream stream, const Rings* rings, Protocol protocol, Body& body) {
    double share = 0;
    if (rings == nullptr || !metadata_number(stream, kFilterSpace, "share", share)) return nullptr;
    Ring* ring = rings->of(envoy_dynamic_module_callback_http_filter_get_worker_index(stream));
    Text id = one_header(stream, kRequestHeader, "x-request-id");
    if (ring == nullptr || !is_drawn(id, share)) return nullptr;
    ring->open();
    std::unique_ptr<Recording> drawn(new Recording(*ring, protocol));
    drawn->id_ = id;
    drawn->head_.request_json = json_bytes(stream, kRequestHeader);
    if (drawn->take(body.size())) drawn->request_ = body.release();
    return drawn;
  }

  Recording(const Recording&) = delete;
  ~Recording() { ring_.release(taken_); }

  // False: nothing of this answer is kept.
  bool on_headers(Stream stream, bool last) {
    head_.code = number_of(one_header(stream, kResponseHeader, ":status"), 0);
    if (head_.code < 200 || head_.code > 299 || !is_of_a_recorded_release(stream)) return false;
    Text encoding = head_.protocol == kGrpc ? "grpc-encoding" : "content-encoding";
    head_.encoding = encoding_of(one_header(stream, kResponseHeader, encoding));
    head_.answer_json = json_bytes(stream, kResponseHeader);
    if (last) end(stream, kResponseHeader);
    return true;
  }

  void on_body(Stream stream, bool last) {
    size_t count = envoy_dynamic_module_callback_http_get_body_chunks_size(stream, kReceivedResponse);
    std::vector<Span> pieces(count);
    if (count > 0 && !envoy_dynamic_module_callback_http_get_body_chunks(stream, kReceivedResponse, pieces.data())) {
      lost_ = true;
      return;
    }
    for (const Span& piece : pieces) {
      if (take(piece.size)) answer_.append(piece.data, piece.size);
    }
    if (last) end(stream, kResponseHeader);
  }

  void on_trailers(Stream stream) { end(stream, kResponseTrailer); }

  // The stream is over: the answer is counted if it was good and went out whole.
  void on_complete(Stream stream) {
    Timing timing{};
    if (!ended_ || (head_.protocol == kGrpc && head_.grpc != 0)) return;
    envoy_dynamic_module_callback_http_get_timing_info(stream, &timing);
    if (!timing.has_last_sent) return;
    Text model = metadata_text(stream, kRoute, "model"), answer = message();
    if (lost_) {
      ring_.write_lost({release_, "", "", "", model, "", ""});
      return;
    }
    head_.t = static_cast<double>(timing.start) / 1e9;
    head_.us = timing.has_received ? static_cast<double>((timing.last_sent - timing.received) / 1000) : std::nan("");
    double epoch = -1;
    metadata_number(stream, kLogSpace, "epoch", epoch);
    head_.epoch = static_cast<int64_t>(epoch);
    Text arm = one_header(stream, kRequestHeader, "x-serin-arm");
    Text client_id = one_header(stream, kRequestHeader, kClientIdHeader);
    Text request = Text(request_).substr(head_.protocol == kGrpc ? kFrameBytes : 0);
    ring_.write(head_, {release_, arm, id_, client_id, model, request, answer});
  }

 private:
  Recording(Ring& ring, Protocol protocol) : ring_(ring) {
    head_.protocol = protocol;
    head_.grpc = -1;
  }

  static uint32_t json_bytes(Stream stream, HeaderKind kind) {
    size_t length = 0;
    Text told = one_header(stream, kind, kJsonBytesHeader);
    return read_length(told, kAllJson - 1, length) ? static_cast<uint32_t>(length) : kAllJson;
  }

  // Whether so many more bytes may be kept. Once they may not, nothing is.
  bool take(size_t bytes) {
    lost_ = lost_ || taken_ + bytes > ring_.largest() || !ring_.reserve(bytes);
    if (!lost_) {
      taken_ += bytes;
    } else {
      request_ = answer_ = std::string();
      ring_.release(taken_);
      taken_ = 0;
    }
    return !lost_;
  }

  // The release whose host sent this answer, which after a retry is not the one that was chosen first.
  bool is_of_a_recorded_release(Stream stream) {
    release_ = metadata_text(stream, kHost, "release");
    return !release_.empty() && metadata_number(stream, kFilterSpace, "share " + release_, head_.share) &&
           is_drawn(id_, head_.share);
  }

  void end(Stream stream, HeaderKind kind) {
    ended_ = true;
    if (head_.protocol == kGrpc) head_.grpc = number_of(one_header(stream, kind, "grpc-status"), 2);
  }

  // The answer without its frame. Its flag says whether it is compressed.
  Text message() {
    Text all(answer_);
    if (head_.protocol != kGrpc) return all;
    uint64_t length = 0;
    for (size_t at = 1; at < kFrameBytes && at < all.size(); ++at) length = length << 8 | static_cast<uint8_t>(all[at]);
    if (all.size() < kFrameBytes || length != all.size() - kFrameBytes) {
      head_.encoding = kUnknown;
      return all;
    }
    if (all[0] == 0) head_.encoding = kPlain;
    return all.substr(kFrameBytes);
  }

  Ring& ring_;
  EntryHead head_{};
  std::string id_, release_, request_, answer_;
  size_t taken_ = 0;
  bool lost_ = false, ended_ = false;
};

}  // namespace serin
