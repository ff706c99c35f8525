// Records requests that were scored, for the recorder: serin/formats/serving/spool_blocks.py describes the files.
//
// The thread that scores only copies a request's columns into a buffer of bounded size. Another thread writes the buffer
// to a file about once a second. When the buffer or the folder is full, or a file cannot be written, requests are
// dropped and counted. No request ever waits for a file, and none fails because of the spool.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <random>
#include <thread>

#include "graph.h"

namespace native {

constexpr size_t kLongestId = 128;           // longer ids are cut
constexpr size_t kMostBytes = 16 << 20;      // of requests that wait to be written
constexpr size_t kWakeBytes = 4 << 20;       // with so many, the writer does not wait for the end of the second
constexpr auto kInterval = std::chrono::milliseconds(900);
constexpr auto kLogInterval = std::chrono::seconds(60);
constexpr char kMagic[] = "\x89SpoolB\n";

// murmur3-32 with seed 0, as spool_blocks.lot.
inline uint32_t lot(std::string_view id) {
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
  state ^= scramble(word) ^ uint32_t(id.size());
  state = (state ^ (state >> 16)) * 0x85EBCA6Bu;
  state = (state ^ (state >> 13)) * 0xC2B2AE35u;
  return state ^ (state >> 16);
}

// Makes room for `more` values, so that adding them cannot fail.
template <typename T>
void grow(std::vector<T>& values, size_t more) {
  size_t needed = values.size() + more;
  if (needed > values.capacity()) values.reserve(std::max(needed, 2 * values.capacity()));
}

// Values of one column, or ids: bytes, and lengths where they are strings.
struct Buffer {
  std::vector<uint32_t> lengths;
  std::vector<char> bytes;

  void reserve(size_t values, size_t more) {
    grow(lengths, values);
    grow(bytes, more);
  }
  void add(std::string_view value) { bytes.insert(bytes.end(), value.begin(), value.end()); }
  void add_string(std::string_view value) {
    lengths.push_back(uint32_t(value.size()));
    add(value);
  }
  void clear() {
    lengths.clear();
    bytes.clear();
  }
};

// One request and the part of a batch's answers that belongs to it.
struct Scored {
  double t;
  std::string_view id, client_id;
  const Reading* reading;
  const std::vector<Answer>* answers;
  int64_t start;  // of its rows in the answers
};

// Requests by column, in the order of the file.
class Rows {
 public:
  explicit Rows(const Settings& settings) : settings_(&settings), columns_(settings.inputs.size() + settings.outputs.size()) {}

  size_t requests() const { return times_.size(); }
  size_t bytes() const { return bytes_; }

  // False when the answers are not what the settings say. Throws bad_alloc, and is unchanged then.
  bool add(const Scored& scored, size_t most) {
    size_t rows = size_t(scored.reading->rows), needed = 32 + scored.id.size() + scored.client_id.size();
    for (size_t place = 0; place < columns_.size(); ++place) needed += size_of(scored, place);
    if (bytes_ + needed > most || !fits(scored)) return false;
    grow(times_, 1);
    grow(counts_, 1);
    ids_.reserve(1, scored.id.size());
    client_ids_.reserve(1, scored.client_id.size());
    for (size_t place = 0; place < columns_.size(); ++place) {
      columns_[place].reserve(rows * width(place), size_of(scored, place));
    }
    times_.push_back(scored.t);
    counts_.push_back(uint32_t(rows));
    ids_.add_string(scored.id);
    client_ids_.add_string(scored.client_id);
    for (size_t place = 0; place < columns_.size(); ++place) copy(scored, place);
    bytes_ += needed;
    rows_ += rows;
    return true;
  }

  // Magic, length, header and buffers.
  std::string head(uint64_t sent, uint64_t dropped) const {
    std::string sizes;
    for (std::string_view piece : pieces()) sizes += (sizes.empty() ? "" : ",") + std::to_string(piece.size());
    std::string text = "{\"requests\":" + std::to_string(requests()) + ",\"rows\":" + std::to_string(rows_) + ",\"sent\":" +
                       std::to_string(sent) + ",\"dropped\":" + std::to_string(dropped) + ",\"sizes\":[" + sizes + "]}";
    uint32_t length = uint32_t(text.size());
    std::string head(kMagic, 8);
    return head.append(reinterpret_cast<const char*>(&length), 4).append(text);
  }

  std::vector<std::string_view> pieces() const {
    std::vector<std::string_view> found;
    if (times_.empty()) return found;
    found.push_back(view(times_));
    found.push_back(view(counts_));
    for (const Buffer* ids : {&ids_, &client_ids_}) found.insert(found.end(), {view(ids->lengths), view(ids->bytes)});
    for (size_t place = 0; place < columns_.size(); ++place) {
      if (is_text(place)) found.push_back(view(columns_[place].lengths));
      found.push_back(view(columns_[place].bytes));
    }
    return found;
  }

  void clear() {
    times_.clear();
    counts_.clear();
    ids_.clear();
    client_ids_.clear();
    for (Buffer& column : columns_) column.clear();
    bytes_ = rows_ = 0;
  }

 private:
  template <typename T>
  static std::string_view view(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
  }

  size_t inputs() const { return settings_->inputs.size(); }
  const Recording::Output& output(size_t place) const { return settings_->recording.outputs[place - inputs()]; }
  bool is_text(size_t place) const { return place < inputs() ? settings_->inputs[place].bytes == 0 : output(place).row_bytes == 0; }
  size_t width(size_t place) const {
    if (!is_text(place)) return 0;
    return place < inputs() ? settings_->inputs[place].width : output(place).width;
  }

  bool fits(const Scored& scored) const {
    if (scored.reading->rows == 0) return true;  // the answers to no rows have no size
    for (size_t place = inputs(); place < columns_.size(); ++place) {
      const Answer& answer = (*scored.answers)[place - inputs()];
      if ((answer.dtype == triton::kBytes) != is_text(place)) return false;
      if (!is_text(place) && answer.row_bytes != output(place).row_bytes) return false;
      for (int64_t row = 0; is_text(place) && row < scored.reading->rows; ++row) {
        if (count_texts(answer.texts[size_t(scored.start + row)]) != width(place)) return false;
      }
    }
    return true;
  }

  size_t size_of(const Scored& scored, size_t place) const {
    if (place < inputs()) return scored.reading->data[place].size();  // of texts: with their lengths
    const Answer& answer = (*scored.answers)[place - inputs()];
    if (answer.dtype != triton::kBytes) return answer.row_bytes * size_t(scored.reading->rows);
    size_t bytes = 0;
    for (int64_t row = 0; row < scored.reading->rows; ++row) bytes += answer.texts[size_t(scored.start + row)].size();
    return bytes;
  }

  void copy(const Scored& scored, size_t place) {
    Buffer& column = columns_[place];
    if (place < inputs()) {
      if (settings_->inputs[place].hidden) return hide(scored, place);
      if (!is_text(place)) return column.add(scored.reading->data[place]);
      for (std::string_view text : scored.reading->texts[place]) column.add_string(text);
      return;
    }
    const Answer& answer = (*scored.answers)[place - inputs()];
    size_t rows = size_t(scored.reading->rows);
    if (!is_text(place)) return column.add({answer.data + answer.row_bytes * size_t(scored.start), answer.row_bytes * rows});
    for (size_t row = 0; row < rows; ++row) {
      each_text(answer.texts[size_t(scored.start) + row], [&](std::string_view text) { column.add_string(text); });
    }
  }

  void hide(const Scored& scored, size_t place) {
    const Column& input = settings_->inputs[place];
    std::string null = input.null();
    for (size_t left = size_t(scored.reading->rows) * input.width; left != 0; --left) {
      if (is_text(place)) columns_[place].lengths.push_back(0);
      columns_[place].add(null);
    }
  }

  template <typename Use>
  static void each_text(std::string_view row, Use use) {
    while (row.size() >= 4) {
      uint32_t length = 0;
      std::memcpy(&length, row.data(), 4);
      use(row.substr(4, length));
      row.remove_prefix(4 + length);
    }
  }

  static size_t count_texts(std::string_view row) {
    size_t count = 0;
    each_text(row, [&](std::string_view) { ++count; });
    return count;
  }

  const Settings* settings_;
  std::vector<double> times_;
  std::vector<uint32_t> counts_;
  Buffer ids_, client_ids_;
  std::vector<Buffer> columns_;
  size_t bytes_ = 0, rows_ = 0;
};

}  // namespace native
