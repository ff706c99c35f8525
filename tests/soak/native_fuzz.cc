// The backend in a program of its own, compiled with sanitizers: a Triton of paper hands it requests that no Triton would
// let pass. Every request must be answered once and given back once. See native_fuzz.py.
//
// usage: fuzz FOLDER ROUNDS SEED INSTANCES; FOLDER holds lib/libonnxruntime.so and 1/{model.onnx, native.txt} of the tests' bundle,
// or front.onnx and core.onnx instead of model.onnx

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "../../triton_models/onnx_native/backend.cc"

using Bytes = std::unique_ptr<char[]>;  // of the exact size: whoever reads one byte more is seen

struct TRITONSERVER_Error {
  int code;
  std::string text;
};
struct TRITONBACKEND_Input {
  std::string name;
  int dtype;
  std::vector<int64_t> shape;
  std::vector<std::pair<Bytes, size_t>> parts;
};
struct TRITONBACKEND_Request {
  std::map<std::string, TRITONBACKEND_Input> inputs;
  std::vector<std::string> outputs;
  int released = 0, sent = 0;
  std::string told;
};
struct TRITONBACKEND_Output {
  Bytes data;
};
struct TRITONBACKEND_Response {
  TRITONBACKEND_Request* request;
  TRITONBACKEND_Output output;
};
struct TRITONBACKEND_Backend {};
struct TRITONBACKEND_Model {};
struct TRITONBACKEND_ModelInstance {
  void* state = nullptr;
};

namespace {

TRITONBACKEND_Backend the_backend;
TRITONBACKEND_Model the_model;
std::string folder, library;
thread_local std::mt19937_64 source;

uint64_t below(uint64_t count) { return source() % count; }
bool once_in(uint64_t count) { return below(count) == 0; }

}  // namespace

extern "C" {

using Error = TRITONSERVER_Error*;

Error TRITONSERVER_ErrorNew(int code, const char* text) { return new TRITONSERVER_Error{code, text}; }
void TRITONSERVER_ErrorDelete(Error error) { delete error; }
const char* TRITONSERVER_ErrorMessage(Error error) { return error->text.c_str(); }
Error TRITONSERVER_LogMessage(int, const char*, int, const char*) { return nullptr; }
Error TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor) { return *major = 1, *minor = 19, nullptr; }
Error TRITONBACKEND_BackendArtifacts(TRITONBACKEND_Backend*, int*, const char** place) {
  return *place = library.c_str(), nullptr;
}
Error TRITONBACKEND_ModelBackend(TRITONBACKEND_Model*, TRITONBACKEND_Backend** found) { return *found = &the_backend, nullptr; }
Error TRITONBACKEND_ModelRepository(TRITONBACKEND_Model*, int*, const char** place) { return *place = folder.c_str(), nullptr; }
Error TRITONBACKEND_ModelVersion(TRITONBACKEND_Model*, uint64_t* version) { return *version = 1, nullptr; }
Error TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Model** found) { return *found = &the_model, nullptr; }
Error TRITONBACKEND_ModelInstanceDeviceId(TRITONBACKEND_ModelInstance*, int32_t* id) { return *id = 0, nullptr; }
Error TRITONBACKEND_ModelInstanceState(TRITONBACKEND_ModelInstance* instance, void** state) { return *state = instance->state, nullptr; }
Error TRITONBACKEND_ModelInstanceSetState(TRITONBACKEND_ModelInstance* instance, void* state) { return instance->state = state, nullptr; }
Error TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request*, bool, uint64_t, uint64_t, uint64_t, uint64_t) {
  return nullptr;
}
Error TRITONBACKEND_ModelInstanceReportBatchStatistics(TRITONBACKEND_ModelInstance*, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
  return nullptr;
}
Error TRITONBACKEND_RequestInput(TRITONBACKEND_Request* request, const char* name, TRITONBACKEND_Input** input) {
  auto found = request->inputs.find(name);
  if (found == request->inputs.end()) return TRITONSERVER_ErrorNew(2, "not found");
  return *input = &found->second, nullptr;
}
Error TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  return *count = uint32_t(request->outputs.size()), nullptr;
}
Error TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request* request, uint32_t index, const char** name) {
  return *name = request->outputs[index].c_str(), nullptr;
}
Error TRITONBACKEND_RequestRelease(TRITONBACKEND_Request* request, uint32_t) { return ++request->released, nullptr; }
Error TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input* input, const char** name, int* dtype, const int64_t** shape, uint32_t* dims, uint64_t* bytes,
    uint32_t* buffers) {
  *name = input->name.c_str(), *dtype = input->dtype, *shape = input->shape.data(), *bytes = 0;
  return *dims = uint32_t(input->shape.size()), *buffers = uint32_t(input->parts.size()), nullptr;
}
Error TRITONBACKEND_InputBuffer(TRITONBACKEND_Input* input, uint32_t index, const void** data, uint64_t* bytes, int* memory, int64_t*) {
  return *data = input->parts[index].first.get(), *bytes = input->parts[index].second, *memory = 0, nullptr;
}
Error TRITONBACKEND_ResponseNew(TRITONBACKEND_Response** made, TRITONBACKEND_Request* request) {
  return *made = new TRITONBACKEND_Response{request, {}}, nullptr;
}
Error TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response* response, TRITONBACKEND_Output** output, const char*, int, const int64_t*, uint32_t) {
  return *output = &response->output, nullptr;
}
Error TRITONBACKEND_ResponseSend(TRITONBACKEND_Response* response, uint32_t, Error error) {
  ++response->request->sent;
  response->request->inputs.clear();  // Triton's gRPC front end reuses their memory as soon as the answer is sent
  response->request->told = error == nullptr ? "answered" : error->text;
  return delete response, nullptr;
}
Error TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output* output, void** data, uint64_t bytes, int* memory, int64_t*) {
  output->data = Bytes(new char[bytes]);
  return *data = output->data.get(), *memory = 0, nullptr;
}

}  // extern "C"

namespace {

void add(TRITONBACKEND_Request& request, const char* name, int dtype, int64_t rows, std::string data) {
  TRITONBACKEND_Input& input = request.inputs[name];
  input.name = name, input.dtype = once_in(80) ? int(below(15)) : dtype;
  input.shape = {once_in(40) ? int64_t(below(9)) : rows, 1};
  if (once_in(100)) input.shape.push_back(1);
  if (once_in(100)) input.shape.clear();
  if (once_in(100)) input.shape = {int64_t(source()), 1};
  if (once_in(40)) data.resize(below(data.size() + 9));
  size_t cut = once_in(4) ? below(data.size() + 1) : 0;  // in two pieces
  for (const std::string& part : {data.substr(0, cut), data.substr(cut)}) {
    if (cut == 0 && part.empty() && !data.empty()) continue;
    Bytes copy(new char[part.size()]);
    std::memcpy(copy.get(), part.data(), part.size());
    input.parts.emplace_back(std::move(copy), part.size());
  }
  if (once_in(200)) input.parts.clear();
}

std::string texts(size_t rows) {
  std::string data;
  for (size_t row = 0; row < rows; ++row) {
    std::string text;
    for (size_t left = once_in(30) ? below(200) : below(6); left != 0; --left) text += char(once_in(25) ? below(256) : 'a' + below(20));
    uint32_t length = once_in(60) ? uint32_t(source()) : uint32_t(text.size());
    data.append(reinterpret_cast<const char*>(&length), 4).append(text);
  }
  return data;
}

std::unique_ptr<TRITONBACKEND_Request> make() {
  auto request = std::make_unique<TRITONBACKEND_Request>();
  size_t rows = below(5);
  std::string distances(rows * 8, '\0'), nights(rows, '\1');
  if (rows != 0 && once_in(15)) distances[0] = 50;  // the graph chokes on it
  if (rows != 0 && once_in(15)) nights[rows - 1] = char(below(256));
  add(*request, "carrier", triton::kBytes, int64_t(rows), texts(rows));
  add(*request, "temp", triton::kFloat, int64_t(rows), std::string(rows * 4, '\1'));
  add(*request, "distance", triton::kInt64, int64_t(rows), distances);
  add(*request, "night", triton::kInt8, int64_t(rows), nights);
  if (once_in(40)) request->inputs.erase("temp");
  request->outputs = {once_in(40) ? "other" : "score"};
  if (once_in(50)) request->outputs.clear();
  return request;
}

}  // namespace

namespace {

std::map<std::string, int> seen;
std::mutex seen_mutex;

// One instance of the model, in a thread as in Triton. Returns the exit code.
int serve(long rounds, uint64_t seed) {
  source.seed(seed);
  TRITONBACKEND_ModelInstance instance;
  if (Error error = TRITONBACKEND_ModelInstanceInitialize(&instance)) return std::puts(error->text.c_str()), 2;
  for (; rounds != 0; --rounds) {
    std::vector<std::unique_ptr<TRITONBACKEND_Request>> kept;
    std::vector<TRITONBACKEND_Request*> batch;
    for (uint64_t left = 1 + below(6); left != 0; --left) batch.push_back(kept.emplace_back(make()).get());
    if (Error error = TRITONBACKEND_ModelInstanceExecute(&instance, batch.data(), uint32_t(batch.size()))) {
      return std::puts(error->text.c_str()), 3;
    }
    for (const auto& request : kept) {
      if (request->sent != 1 || request->released != 1) return std::printf("answered %d times, given back %d times\n", request->sent, request->released), 4;
      std::lock_guard<std::mutex> lock(seen_mutex);
      std::string words_only;
      for (char each : request->told) if ((each < '0' || each > '9') && each != '-') words_only += each;
      ++seen[words_only];
    }
  }
  TRITONBACKEND_ModelInstanceFinalize(&instance);
  return 0;
}

}  // namespace

int main(int, char** words) {
  folder = words[1], library = folder + "/lib";
  long rounds = std::strtol(words[2], nullptr, 10), count = std::strtol(words[4], nullptr, 10);
  uint64_t seed = std::strtoull(words[3], nullptr, 10);
  std::vector<int> codes(size_t(count), 0);
  std::vector<std::thread> instances;
  for (long number = 0; number < count; ++number) {
    instances.emplace_back([&, number] { codes[size_t(number)] = serve(rounds / count, seed + uint64_t(number)); });
  }
  for (std::thread& instance : instances) instance.join();
  for (int code : codes) if (code != 0) return code;
  for (const auto& [told, count] : seen) std::printf("%8d %s\n", count, told.c_str());
}
