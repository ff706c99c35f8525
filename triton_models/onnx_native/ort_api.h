// ONNX Runtime's C interface: a table of functions whose places never change from version to version. Its packages for
// Python hold the library and no header, so the places that are used stand here.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

namespace ort {

struct Status;
struct Env;
struct SessionOptions;
struct Session;
struct Value;
struct TypeAndShape;
struct MemoryInfo;
struct Allocator;
struct RunOptions;
struct IoBinding;
struct CudaOptions;

enum Element { kFloat = 1, kUInt8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kString = 8, kBool = 9, kDouble = 11 };

constexpr uint32_t kVersion = 17;  // of the interface, not of the library: newer libraries know it too

class Api {
 public:
  explicit Api(const std::string& library) {
    // Providers are looked for beside the library: in the folder of the file itself, not of a link to it.
    char* file = realpath(library.c_str(), nullptr);
    void* handle = dlopen(file == nullptr ? library.c_str() : file, RTLD_NOW | RTLD_LOCAL);
    std::free(file);
    if (handle == nullptr) throw std::runtime_error(std::string("ONNX Runtime cannot be loaded: ") + dlerror());
    struct Base {
      void* const* (*table)(uint32_t version);
      const char* (*version)();
    };
    auto base = reinterpret_cast<const Base* (*)()>(dlsym(handle, "OrtGetApiBase"));
    table_ = base == nullptr ? nullptr : base()->table(kVersion);
    if (table_ == nullptr) throw std::runtime_error(library + " is no ONNX Runtime that this backend knows");
  }

  // A call that gives a status; what it complains of becomes an exception.
  template <typename... Arguments>
  void call(size_t place, Arguments... arguments) const {
    Status* status = reinterpret_cast<Status* (*)(Arguments...)>(table_[place])(arguments...);
    if (status == nullptr) return;
    std::string text = reinterpret_cast<const char* (*)(const Status*)>(table_[kErrorMessage])(status);
    release(kReleaseStatus, status);
    throw std::runtime_error(text);
  }

  template <typename T>
  void release(size_t place, T* object) const {
    if (object != nullptr) reinterpret_cast<void (*)(T*)>(table_[place])(object);
  }

  // For std::unique_ptr.
  struct Releaser {
    const Api* api;
    size_t place;
    template <typename T>
    void operator()(T* object) const {
      api->release(place, object);
    }
  };

  template <typename T>
  std::unique_ptr<T, Releaser> own(size_t place, T* object) const {
    return {object, Releaser{this, place}};
  }

  enum Place : size_t {
    kErrorMessage = 2,
    kCreateEnv = 3,
    kCreateSession = 7,
    kRun = 9,
    kCreateSessionOptions = 10,
    kSetIntraOpThreads = 24,
    kSetInterOpThreads = 25,
    kCreateRunOptions = 39,
    kCreateTensor = 48,
    kCreateTensorOver = 49,
    kTensorData = 51,
    kStringsLength = 53,
    kStringsContent = 54,
    kElementType = 60,
    kDimsCount = 61,
    kDims = 62,
    kElementCount = 64,
    kTypeAndShape = 65,
    kCreateMemoryInfo = 68,
    kCreateCpuMemoryInfo = 69,
    kDefaultAllocator = 78,
    kReleaseStatus = 93,
    kReleaseMemoryInfo = 94,
    kReleaseSession = 95,
    kReleaseValue = 96,
    kReleaseRunOptions = 97,
    kReleaseTypeAndShape = 99,
    kReleaseSessionOptions = 100,
    kAddConfigEntry = 130,
    kRunWithBinding = 133,
    kCreateIoBinding = 134,
    kReleaseIoBinding = 135,
    kBindInput = 136,
    kBindOutput = 137,
    kAddRunConfigEntry = 165,
    kAppendCuda = 204,
    kCreateCudaOptions = 205,
    kUpdateCudaOptions = 206,
    kReleaseCudaOptions = 208,
    kStringBuffer = 252,
    kSetCudaOption = 263,
  };

 private:
  void* const* table_ = nullptr;
};

}  // namespace ort
