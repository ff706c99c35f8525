// What a client reads and writes on one connection: whole HTTP/1.1 requests, or gRPC calls as frames of HTTP/2.
// Requests are prepared bytes and nothing in an answer is decoded, so that the server is measured and not its client.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

using Text = std::string_view;

enum class Answer { kNone, kGood, kBad };

class Wire {
 public:
  virtual ~Wire() = default;
  // Appends what is sent when a connection opens.
  virtual void open(std::string& out) = 0;
  virtual void ask(Text request, std::string& out) = 0;
  // Takes received bytes; appends what the protocol wants in return.
  virtual Answer take(Text received, std::string& out) = 0;
};

class Http1 : public Wire {
 public:
  void open(std::string&) override { received_.clear(); }
  void ask(Text request, std::string& out) override { out.append(request); }

  Answer take(Text received, std::string&) override {
    received_.append(received);
    size_t head = received_.find("\r\n\r\n");
    if (head == std::string::npos || received_.size() < head + 4) return Answer::kNone;
    size_t end = end_of_answer(head);
    if (end == 0 || received_.size() < end) return Answer::kNone;
    bool good = received_.compare(0, 12, "HTTP/1.1 200") == 0;
    received_.erase(0, end);
    return good ? Answer::kGood : Answer::kBad;
  }

 private:
  // Where the answer ends; 0: not known yet.
  size_t end_of_answer(size_t head) const {
    size_t start = head + 4;
    if (const char* length = value_of("\r\ncontent-length:", head)) return start + strtoull(length, nullptr, 10);
    if (value_of("\r\ntransfer-encoding: chunked", head) == nullptr) return start;
    for (;;) {
      size_t line = received_.find("\r\n", start);
      if (line == std::string::npos) return 0;
      size_t size = strtoull(received_.c_str() + start, nullptr, 16);
      start = line + 2 + size + 2;
      if (size == 0) return start;
      if (start > received_.size()) return 0;
    }
  }

  // What follows `name` in the head, whatever the case of its letters.
  const char* value_of(Text name, size_t head) const {
    auto same = [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; };
    auto end = received_.begin() + static_cast<ptrdiff_t>(head + 2);
    auto found = std::search(received_.begin(), end, name.begin(), name.end(), same);
    return found == end ? nullptr : &*found + name.size();
  }

  std::string received_;
};

class Grpc : public Wire {
 public:
  Grpc(std::string path, std::string authority) : path_(std::move(path)), authority_(std::move(authority)) {}

  void open(std::string& out) override {
    received_.clear();
    unsent_ = {};
    stream_ = 0;
    window_ = first_window_ = 65535;
    out.append("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    frame(out, kSettings, 0, 0, 6);
    out.append({0, 4});  // the window of a stream
    number(out, kMostBytes);
    frame(out, kWindowUpdate, 0, 0, 4);
    number(out, kMostBytes - 65535);
  }

  void ask(Text request, std::string& out) override {
    stream_ = stream_ == 0 ? 1 : stream_ + 2;
    answered_bytes_ = 0;
    stream_window_ = first_window_;
    std::string headers = stream_ == 1 ? first_headers() : std::string("\x83\x86\xc1\xc0\xbf\xbe");
    frame(out, kHeaders, kEndHeaders, stream_, headers.size());
    out.append(headers);
    message_.assign(1, '\0');  // not compressed
    number(message_, static_cast<uint32_t>(request.size()));
    message_.append(request);
    unsent_ = message_;
    send(out);
  }

  Answer take(Text received, std::string& out) override {
    received_.append(received);
    Answer answer = Answer::kNone;
    size_t at = 0;
    while (received_.size() - at >= kFrameBytes) {
      const auto* head = reinterpret_cast<const unsigned char*>(received_.data() + at);
      size_t length = size_t{head[0]} << 16 | size_t{head[1]} << 8 | head[2];
      if (received_.size() - at < kFrameBytes + length) break;
      Answer found = read(head[3], head[4], read_number(head + 5) & 0x7fffffff,
                          Text(received_).substr(at + kFrameBytes, length), out);
      if (found != Answer::kNone) answer = found;
      at += kFrameBytes + length;
    }
    received_.erase(0, at);
    return answer;
  }

 private:
  enum Kind { kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kPing = 6, kGoAway = 7, kWindowUpdate = 8 };
  enum Flag { kEndStream = 1, kAck = 1, kEndHeaders = 4 };
  static constexpr size_t kFrameBytes = 9;
  static constexpr size_t kMostData = 16384;
  static constexpr uint32_t kMostBytes = 0x7fffffff;

  static void number(std::string& out, uint32_t value) {
    for (int shift = 24; shift >= 0; shift -= 8) out.push_back(static_cast<char>(value >> shift));
  }

  static uint32_t read_number(const unsigned char* at) {
    return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
  }

  static void frame(std::string& out, Kind kind, int flags, uint32_t stream, size_t length) {
    for (int shift = 16; shift >= 0; shift -= 8) out.push_back(static_cast<char>(length >> shift));
    out.push_back(static_cast<char>(kind));
    out.push_back(static_cast<char>(flags));
    number(out, stream);
  }

  // The first call puts its headers into the table (RFC 7541) from which later calls name them: path, authority,
  // content type and te are 65 to 62 then.
  std::string first_headers() const {
    auto text = [](Text value) { return std::string(1, static_cast<char>(value.size())).append(value); };
    std::string found("\x83\x86");  // POST, http
    found.append("\x44").append(text(path_)).append("\x41").append(text(authority_));
    found.append("\x5f").append(text("application/grpc")).append("\x40").append(text("te")).append(text("trailers"));
    return found;
  }

  void send(std::string& out) {
    while (!unsent_.empty() && std::min(window_, stream_window_) > 0) {
      size_t room = static_cast<size_t>(std::min<int64_t>(std::min(window_, stream_window_), kMostData));
      size_t now = std::min(unsent_.size(), room);
      frame(out, kData, now == unsent_.size() ? kEndStream : 0, stream_, now);
      out.append(unsent_.substr(0, now));
      unsent_.remove_prefix(now);
      window_ -= static_cast<int64_t>(now);
      stream_window_ -= static_cast<int64_t>(now);
    }
  }

  Answer read(unsigned kind, unsigned flags, uint32_t stream, Text payload, std::string& out) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(payload.data());
    switch (kind) {
      case kData:
        answered_bytes_ += payload.size();
        return (flags & kEndStream) != 0 ? ended() : Answer::kNone;
      case kHeaders:
        return (flags & kEndStream) != 0 ? ended() : Answer::kNone;
      case kReset:
        return stream == stream_ ? Answer::kBad : Answer::kNone;
      case kGoAway:
        return Answer::kBad;
      case kSettings:
        if ((flags & kAck) != 0) break;
        for (size_t at = 0; at + 6 <= payload.size(); at += 6) {
          if (bytes[at + 1] != 4) continue;
          int64_t told = read_number(bytes + at + 2);
          stream_window_ += told - first_window_;
          first_window_ = told;
        }
        frame(out, kSettings, kAck, 0, 0);
        send(out);
        break;
      case kPing:
        if ((flags & kAck) != 0) break;
        frame(out, kPing, kAck, 0, payload.size());
        out.append(payload);
        break;
      case kWindowUpdate:
        (stream == 0 ? window_ : stream_window_) += read_number(bytes);
        send(out);
        break;
      default:
        break;
    }
    return Answer::kNone;
  }

  // A call that failed has a status and no message.
  Answer ended() const { return answered_bytes_ > 5 ? Answer::kGood : Answer::kBad; }

  std::string path_, authority_, received_, message_;
  Text unsent_;
  uint32_t stream_ = 0;
  size_t answered_bytes_ = 0;
  int64_t window_ = 65535, stream_window_ = 65535, first_window_ = 65535;
};
