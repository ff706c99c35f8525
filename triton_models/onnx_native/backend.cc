// A Triton backend that answers a batch of requests with one run of the bundle's ONNX graph, inside Triton's process: on
// the CPU, or with strings and features there and the network on a GPU.
//
// It says and refuses what onnx_python/1/model.py says and refuses, without a process and a copy in between: a request
// that cannot be scored is answered with an error of its own and never fails those that share its batch.

#include <chrono>

#include "graph.h"
#include "split.h"

namespace {

using native::BadRequest;
using native::Graph;
using native::Reading;
using native::Scorer;
using native::Settings;
using native::SplitGraph;

constexpr char kUnscorable[] = "the model could not score this request; the server's log says why";

uint64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void forget(TRITONSERVER_Error* error) {
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

struct Runtime {
  explicit Runtime(const std::string& folder) : api(folder + "/libonnxruntime.so") {
    api.call(ort::Api::kCreateEnv, 2 /* warnings */, "serin", &env);
  }
  ort::Api api;
  ort::Env* env = nullptr;
};

// One for the process, and never taken down: threads may end after the last model.
Runtime& runtime(const std::string& folder) {
  static Runtime* made = new Runtime(folder);
  return *made;
}

struct Asked {
  TRITONBACKEND_Request* request = nullptr;
  TRITONBACKEND_Response* response = nullptr;
  Reading reading;
  bool answered = false, success = false;
};

void refuse(Asked& asked, int code, const std::string& text) {
  if (asked.answered) return;
  asked.answered = true;
  TRITONSERVER_Error* error = TRITONSERVER_ErrorNew(code, text.c_str());
  if (asked.response != nullptr) forget(TRITONBACKEND_ResponseSend(asked.response, triton::kLast, error));
  TRITONSERVER_ErrorDelete(error);
}

void answer(Asked& asked, const Settings& settings, const std::vector<native::Answer>& outputs, int64_t start) {
  uint32_t wanted = 0;
  native::check(TRITONBACKEND_RequestOutputCount(asked.request, &wanted));
  for (uint32_t index = 0; index < wanted; ++index) {
    const char* name = nullptr;
    native::check(TRITONBACKEND_RequestOutputName(asked.request, index, &name));
    auto found = std::find(settings.outputs.begin(), settings.outputs.end(), name);
    if (found == settings.outputs.end()) throw std::runtime_error(std::string("there is no output '") + name + "'");
    const native::Answer& whole = outputs[found - settings.outputs.begin()];
    std::vector<int64_t> shape = whole.dims;
    shape[0] = asked.reading.rows;
    std::string texts;
    if (whole.dtype == triton::kBytes) {
      for (int64_t row = start; row < start + asked.reading.rows; ++row) texts += whole.texts[row];
    }
    bool is_text = whole.dtype == triton::kBytes;
    size_t bytes = is_text ? texts.size() : whole.row_bytes * size_t(asked.reading.rows);
    const char* from = is_text ? texts.data() : whole.data + whole.row_bytes * size_t(start);
    TRITONBACKEND_Output* output = nullptr;
    native::check(TRITONBACKEND_ResponseOutput(asked.response, &output, name, whole.dtype, shape.data(), shape.size()));
    void* buffer = nullptr;
    int memory = triton::kMemoryCpu;
    int64_t device = 0;
    native::check(TRITONBACKEND_OutputBuffer(output, &buffer, bytes, &memory, &device));
    if (memory == triton::kMemoryGpu) throw std::runtime_error("an output was asked for in a GPU's memory");
    if (bytes != 0) std::memcpy(buffer, from, bytes);
  }
  asked.answered = true;
  native::check(TRITONBACKEND_ResponseSend(asked.response, triton::kLast, nullptr));
  asked.success = true;
}

// Scores in halves where a batch fails: the others must not pay for the one at fault.
void score(Scorer& graph, Asked** begin, Asked** end) {
  if (begin == end) return;
  int64_t rows = 0;
  std::vector<const Reading*> batch;
  for (Asked** each = begin; each != end; ++each) {
    batch.push_back(&(*each)->reading);
    rows += (*each)->reading.rows;
  }
  std::string fault;
  try {
    graph.run(batch, rows, [&](const std::vector<native::Answer>& outputs) {
      int64_t start = 0;
      for (Asked** each = begin; each != end; ++each) {
        try {
          answer(**each, graph.settings(), outputs, start);
        } catch (const std::exception& error) {
          refuse(**each, triton::kInternal, error.what());
        }
        start += (*each)->reading.rows;
      }
    });
    return;
  } catch (const std::exception& error) {
    fault = error.what();
  }
  if (end - begin > 1) {
    Asked** middle = begin + (end - begin) / 2;
    score(graph, begin, middle);
    score(graph, middle, end);
    return;
  }
  forget(TRITONSERVER_LogMessage(triton::kLogError, __FILE__, __LINE__, ("scoring failed: " + fault).c_str()));
  refuse(**begin, triton::kInternal, kUnscorable);
}

void read(Asked& asked, const Settings& settings) {
  try {
    native::check(TRITONBACKEND_ResponseNew(&asked.response, asked.request));
    asked.reading.read(asked.request, settings);
  } catch (const BadRequest& error) {
    refuse(asked, triton::kInvalid, error.what());
  } catch (const std::exception& error) {
    refuse(asked, triton::kInternal, error.what());
  }
}

std::string version_folder(TRITONBACKEND_Model* model) {
  const char* repository = nullptr;
  int kind = 0;
  uint64_t version = 0;
  native::check(TRITONBACKEND_ModelRepository(model, &kind, &repository));
  native::check(TRITONBACKEND_ModelVersion(model, &version));
  return std::string(repository) + "/" + std::to_string(version);
}

// The whole graph on the CPU, or its front there and its core on the device.
std::unique_ptr<Scorer> open_graph(Runtime& onnx, const std::string& folder, TRITONBACKEND_ModelInstance* instance) {
  Settings settings = Settings::read(folder + "/native.txt");
  if (settings.split.sizes.empty()) return std::make_unique<Graph>(onnx.api, onnx.env, folder + "/model.onnx", settings);
  std::unique_ptr<native::Device> device;
  if (settings.split.provider == "cuda") {
    int32_t number = 0;
    native::check(TRITONBACKEND_ModelInstanceDeviceId(instance, &number));
    device = std::make_unique<native::Gpu>(number);
  } else {
    device = std::make_unique<native::Host>();
  }
  return std::make_unique<SplitGraph>(onnx.api, onnx.env, folder, settings, std::move(device));
}

TRITONSERVER_Error* failed(const std::exception& error) { return TRITONSERVER_ErrorNew(triton::kInternal, error.what()); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*) {
  uint32_t major = 0, minor = 0;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ApiVersion(&major, &minor)) return error;
  if (major == 1) return nullptr;
  return TRITONSERVER_ErrorNew(triton::kUnsupported, "this backend is for version 1 of Triton's interface");
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  try {
    TRITONBACKEND_Model* model = nullptr;
    TRITONBACKEND_Backend* backend = nullptr;
    const char* library = nullptr;
    int kind = 0;
    native::check(TRITONBACKEND_ModelInstanceModel(instance, &model));
    native::check(TRITONBACKEND_ModelBackend(model, &backend));
    native::check(TRITONBACKEND_BackendArtifacts(backend, &kind, &library));
    std::string folder = version_folder(model);
    Runtime& onnx = runtime(library);
    std::unique_ptr<Scorer> made = open_graph(onnx, folder, instance);
    native::check(TRITONBACKEND_ModelInstanceSetState(instance, made.get()));
    made.release();
    return nullptr;
  } catch (const std::exception& error) {
    return failed(error);
  }
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  void* state = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceState(instance, &state)) return error;
  delete static_cast<Scorer*>(state);
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  void* state = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceState(instance, &state)) return error;
  Scorer& graph = *static_cast<Scorer*>(state);
  uint64_t begin = now_ns(), computing = begin, rows = 0;
  std::vector<Asked> all;
  try {
    all.resize(count);  // from here on every request is answered and given back
  } catch (const std::exception& error) {
    return failed(error);
  }
  try {
    std::vector<Asked*> sound;
    for (uint32_t index = 0; index < count; ++index) {
      all[index].request = requests[index];
      read(all[index], graph.settings());
      if (!all[index].answered) {
        sound.push_back(&all[index]);
        rows += all[index].reading.rows;
      }
    }
    computing = now_ns();
    score(graph, sound.data(), sound.data() + sound.size());
  } catch (const std::exception& error) {
    forget(TRITONSERVER_LogMessage(triton::kLogError, __FILE__, __LINE__, error.what()));
  }
  uint64_t end = now_ns();
  for (uint32_t index = 0; index < count; ++index) {
    all[index].request = requests[index];
    if (!all[index].answered) refuse(all[index], triton::kInternal, kUnscorable);
    forget(TRITONBACKEND_ModelInstanceReportStatistics(instance, requests[index], all[index].success, begin, computing, end, end));
  }
  if (rows != 0) forget(TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, rows, begin, computing, end, end));
  for (uint32_t index = 0; index < count; ++index) {
    forget(TRITONBACKEND_RequestRelease(requests[index], triton::kReleaseAll));
  }
  return nullptr;
}

}  // extern "C"
#pragma GCC visibility pop
