// How an entry of a ring begins. The gateway writes it (ring.h), the recorder reads it (../recorder/decode.cc and
// serin/formats/serving/ring.py). Its texts follow: release, arm, id, client id, model, request, answer.

#pragma once

#include <cstddef>
#include <cstdint>

namespace serin {

constexpr uint32_t kAllJson = 0xffffffff;
constexpr size_t kTexts = 7;

enum EntryKind : uint16_t { kRecorded = 1, kFiller = 2, kLost = 3 };
enum Protocol : uint16_t { kHttp = 1, kGrpc = 2 };
enum Encoding : uint32_t { kPlain = 0, kGzip = 1, kDeflate = 2, kUnknown = 3 };

struct EntryHead {
  uint32_t size;
  uint16_t kind, protocol;
  double t, us;
  int32_t code, grpc;
  int64_t epoch;
  double share;
  uint32_t request_json, answer_json, encoding, lengths[kTexts];
};
static_assert(sizeof(EntryHead) == 88);

}  // namespace serin
