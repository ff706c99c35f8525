// Decodes what the gateway has left in a ring (serin/formats/serving/ring.py): the entries of one release become columns.
// An entry that cannot be read is counted by its reason and leaves nothing in them.

#include <array>
#include <atomic>
#include <exception>
#include <memory>

#include "../request_filter/entry.h"
#include "values.h"

namespace serin {
namespace {

enum Fault : uint32_t { kNone, kRequestFault, kInputsFault, kAnswerFault, kFaults };
enum Part { kRelease, kArm, kId, kClientId, kModel, kRequestBody, kAnswerBody, kParts };

constexpr size_t kLongestId = 128;  // longer ids are cut

static_assert(size_t{kParts} == kTexts);

struct Strings {
  std::vector<uint32_t> lengths;
  std::string data;

  void add(Text text) {
    data.append(text);
    lengths.push_back(static_cast<uint32_t>(text.size()));
  }
};

template <typename Value>
Text bytes_of(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

class Decoder {
 public:
  // A line for each column: `input` or `output`, the datatype, the width, whether it is hidden, the name in hexadecimal.
  explicit Decoder(Text lines) {
    while (!lines.empty()) {
      size_t end = std::min(lines.find('\n'), lines.size());
      add_column(std::string(lines.substr(0, end)));
      lines.remove_prefix(std::min(end + 1, lines.size()));
    }
    for (auto* columns : {&inputs_, &outputs_}) marks_.resize(marks_.size() + columns->size());
  }

  void decode(const char* at) {
    save();
    Fault fault = read(at);
    ++faults_[fault];
    if (fault != kNone) restore();
  }

  std::vector<Text> buffers() const {
    std::vector<Text> found = {bytes_of(t_), bytes_of(us_), bytes_of(codes_), bytes_of(epochs_), bytes_of(rows_)};
    for (const Strings* each : {&ids_, &client_ids_, &arms_}) {
      found.push_back(bytes_of(each->lengths));
      found.push_back(each->data);
    }
    for (const auto* columns : {&inputs_, &outputs_}) {
      for (const Column& column : *columns) {
        found.push_back(bytes_of(column.lengths));
        found.push_back(column.data);
        found.push_back(column.given);
      }
    }
    found.emplace_back(reinterpret_cast<const char*>(faults_.data()), sizeof faults_);
    return found;
  }

 private:
  struct Mark {
    size_t data, lengths, given;
  };

  void add_column(const std::string& line) {
    size_t type = line.find(' ') + 1, width = line.find(' ', type) + 1, hidden = line.find(' ', width) + 1;
    Column made;
    made.kind = kind_of(Text(line).substr(type, width - 1 - type));
    made.width = std::atoll(line.c_str() + width);
    made.hidden = line[hidden] == '1';
    for (size_t at = hidden + 2; at + 1 < line.size(); at += 2) {
      made.name += static_cast<char>(std::stoi(line.substr(at, 2), nullptr, 16));
    }
    (line[0] == 'i' ? inputs_ : outputs_).push_back(std::move(made));
  }

  template <typename Act>
  void each_column(Act act) {
    size_t place = 0;
    for (auto* columns : {&inputs_, &outputs_}) {
      for (Column& column : *columns) act(column, marks_[place++]);
    }
  }

  void save() {
    each_column([](Column& column, Mark& mark) {
      mark = {column.data.size(), column.lengths.size(), column.given.size()};
    });
  }

  void restore() {
    each_column([](Column& column, Mark& mark) {
      column.data.resize(mark.data), column.lengths.resize(mark.lengths), column.given.resize(mark.given);
    });
  }

  Fault read(const char* at) {
    EntryHead fixed;
    std::memcpy(&fixed, at, sizeof fixed);
    Text parts[kParts], rest(at + sizeof fixed, fixed.size - sizeof fixed);
    for (int part = 0; part < kParts; ++part) {
      if (fixed.lengths[part] > rest.size()) return kRequestFault;
      parts[part] = rest.substr(0, fixed.lengths[part]);
      rest.remove_prefix(parts[part].size());
    }
    Message &request = request_, &answer = answer_;
    request.clear(), answer.clear();
    bool grpc = fixed.protocol == kGrpc;
    if (!message(parts[kRequestBody], fixed.request_json, grpc, true, request)) return kRequestFault;
    if (!message(parts[kAnswerBody], fixed.answer_json, grpc, false, answer)) return kAnswerFault;
    int64_t rows = -1;
    if (!add_inputs(request, parts[kRequestBody].size(), rows)) return kInputsFault;
    if (!add_outputs(answer, request.classified, rows)) return kAnswerFault;
    t_.push_back(fixed.t), us_.push_back(fixed.us), codes_.push_back(fixed.code), epochs_.push_back(fixed.epoch);
    rows_.push_back(static_cast<uint32_t>(rows));
    ids_.add(parts[kId].substr(0, kLongestId));
    client_ids_.add((parts[kClientId].empty() ? Text(request.id) : parts[kClientId]).substr(0, kLongestId));
    arms_.add(parts[kArm]);
    return kNone;
  }

  bool message(Text body, uint32_t json, bool grpc, bool request, Message& found) {
    if (grpc) {
      if (!read_grpc(body, request, found)) return false;
    } else {
      if (json != kAllJson && json > body.size()) return false;
      size_t length = json == kAllJson ? body.size() : json;
      if (!JsonMessage(body.substr(0, length), found).read(request ? "inputs" : "outputs", body.substr(length))) return false;
    }
    return !found.has_twins(request ? inputs_ : outputs_);
  }

  // Whether a tensor is what the model's schema names. A BOOL has the same bytes as an INT8.
  static bool fits(const Tensor& tensor, const Column& column) {
    bool alike = tensor.kind == column.kind;
    if (!alike && tensor.kind != nullptr) alike = tensor.kind->name == "BOOL" && column.kind->name == "INT8";
    return alike && tensor.rows >= 0 && tensor.width == column.width;
  }

  bool add_inputs(Message& request, size_t bytes, int64_t& rows) {
    std::vector<Column*> missing;
    for (size_t place = 0; place < inputs_.size(); ++place) {
      Column& column = inputs_[place];
      const Tensor* tensor = request.find(column.name, place);
      if (tensor == nullptr) {
        if (!column.hidden) missing.push_back(&column);
        continue;
      }
      bool same = rows < 0 || rows == tensor->rows;
      if (!fits(*tensor, column) || !same || tensor->rows > static_cast<int64_t>(bytes)) return false;
      rows = tensor->rows;
      if (!column.hidden && !append(*tensor, column)) return false;
    }
    if (rows < 0) return false;
    for (Column* column : missing) {
      if (!append_nulls(rows * column->width, *column)) return false;
    }
    return true;
  }

  // An output that is not there, or is there in another form, has no value.
  bool add_outputs(Message& answer, const std::vector<std::string>& classified, int64_t rows) {
    for (size_t place = 0; place < outputs_.size(); ++place) {
      Column& column = outputs_[place];
      const Tensor* tensor = answer.find(column.name, place);
      bool classes = std::find(classified.begin(), classified.end(), column.name) != classified.end();
      bool good = tensor != nullptr && !classes && tensor->form != Form::kAbsent && fits(*tensor, column) && tensor->rows == rows;
      column.given += static_cast<char>(good);
      size_t values = static_cast<size_t>(rows * column.width);
      if (good) {
        if (!append(*tensor, column)) return false;
      } else if (column.kind->bytes == 0) {
        column.lengths.resize(column.lengths.size() + values);
      } else {
        column.data.append(values * column.kind->bytes, '\0');
      }
    }
    return true;
  }

  std::vector<Column> inputs_, outputs_;
  std::vector<Mark> marks_;
  Message request_, answer_;  // of one entry after the other
  std::vector<double> t_, us_;
  std::vector<int32_t> codes_;
  std::vector<int64_t> epochs_;
  std::vector<uint32_t> rows_;
  Strings ids_, client_ids_, arms_;
  std::array<uint64_t, kFaults> faults_ = {};
};

struct Decoded {
  Decoder decoder;
  std::vector<Text> buffers;
};

}  // namespace
}  // namespace serin

#pragma GCC visibility push(default)
extern "C" {

// Decodes the entries at these addresses. Null: there is not enough memory.
void* serin_decode(const char* columns, size_t size, const uint64_t* entries, size_t count) {
  try {
    std::atomic_thread_fence(std::memory_order_acquire);  // the ring's head was read before
    auto made = std::make_unique<serin::Decoded>(serin::Decoded{serin::Decoder({columns, size}), {}});
    for (size_t each = 0; each < count; ++each) made->decoder.decode(reinterpret_cast<const char*>(entries[each]));
    made->buffers = made->decoder.buffers();
    return made.release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

size_t serin_decoded_size(const void* decoded, size_t buffer) {
  return static_cast<const serin::Decoded*>(decoded)->buffers[buffer].size();
}

const void* serin_decoded_data(const void* decoded, size_t buffer) {
  return static_cast<const serin::Decoded*>(decoded)->buffers[buffer].data();
}

void serin_decoded_free(void* decoded) { delete static_cast<serin::Decoded*>(decoded); }
}
#pragma GCC visibility pop
