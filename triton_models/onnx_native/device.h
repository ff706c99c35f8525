// The device that a core runs on: its memory, copies in order, and one wait. A GPU by the calls of its driver's library,
// which is there wherever a GPU is; or the host, which plays the device where there is none.
#pragma once

#include "joining.h"

namespace native {

class Device {
 public:
  virtual ~Device() = default;
  virtual void use() = 0;  // by a thread, before it calls anything else
  virtual void* take(size_t bytes) = 0;
  virtual void give(void* memory) = 0;
  virtual void* take_host(size_t bytes) = 0;  // memory of the host that the device copies from and to
  virtual void give_host(void* memory) = 0;
  virtual void copy_in(void* to, const void* from, size_t bytes) = 0;
  virtual void copy_out(void* to, const void* from, size_t bytes) = 0;
  virtual void wait() = 0;
  virtual bool has_graphs() const = 0;
  virtual void configure(const ort::Api& api, ort::SessionOptions* options, size_t arena_bytes, bool graphs) = 0;
  virtual ort::MemoryInfo* memory(const ort::Api& api) = 0;  // the caller's to release
};

class Host : public Device {
 public:
  void use() override {}
  void* take(size_t bytes) override {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes) != 0) throw std::bad_alloc();
    return memory;
  }
  void give(void* memory) override { std::free(memory); }
  void* take_host(size_t bytes) override { return take(bytes); }
  void give_host(void* memory) override { give(memory); }
  void copy_in(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void copy_out(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void wait() override {}
  bool has_graphs() const override { return false; }
  void configure(const ort::Api&, ort::SessionOptions*, size_t, bool) override {}
  ort::MemoryInfo* memory(const ort::Api& api) override {
    ort::MemoryInfo* made = nullptr;
    api.call(ort::Api::kCreateCpuMemoryInfo, 0 /* of a device */, 0 /* default */, &made);
    return made;
  }
};

// The calls of libcuda.so.1 that are made. Their names and arguments have not changed for many years.
struct Driver {
  using Address = unsigned long long;
  int (*init)(unsigned flags);
  int (*device)(int* device, int number);
  int (*retain)(void** context, int device);
  int (*release)(int device);
  int (*set_current)(void* context);
  int (*create_stream)(void** stream, unsigned flags);
  int (*destroy_stream)(void* stream);
  int (*synchronize)(void* stream);
  int (*allocate)(Address* memory, size_t bytes);
  int (*free)(Address memory);
  int (*allocate_host)(void** memory, size_t bytes, unsigned flags);
  int (*free_host)(void* memory);
  int (*copy_in)(Address to, const void* from, size_t bytes, void* stream);
  int (*copy_out)(void* to, Address from, size_t bytes, void* stream);
  int (*error)(int code, const char** text);

  static const Driver& load() {
    static const Driver* made = new Driver();
    return *made;
  }

  void check(int code, const char* what) const {
    if (code == 0) return;
    const char* text = nullptr;
    error(code, &text);
    throw std::runtime_error(std::string("CUDA: ") + what + ": " + (text == nullptr ? std::to_string(code) : text));
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(std::string("the driver of a GPU cannot be loaded: ") + dlerror());
    auto find = [library](auto& call, const char* name) {
      call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(library, name));
      if (call == nullptr) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name);
    };
    find(init, "cuInit");
    find(device, "cuDeviceGet");
    find(retain, "cuDevicePrimaryCtxRetain");
    find(release, "cuDevicePrimaryCtxRelease_v2");
    find(set_current, "cuCtxSetCurrent");
    find(create_stream, "cuStreamCreate");
    find(destroy_stream, "cuStreamDestroy_v2");
    find(synchronize, "cuStreamSynchronize");
    find(allocate, "cuMemAlloc_v2");
    find(free, "cuMemFree_v2");
    find(allocate_host, "cuMemHostAlloc");
    find(free_host, "cuMemFreeHost");
    find(copy_in, "cuMemcpyHtoDAsync_v2");
    find(copy_out, "cuMemcpyDtoHAsync_v2");
    find(error, "cuGetErrorString");
    check(init(0), "starting");
  }
};

// One GPU with one stream, in the context that ONNX Runtime uses too.
class Gpu : public Device {
 public:
  explicit Gpu(int number) : driver_(Driver::load()), number_(number) {
    driver_.check(driver_.device(&device_, number), "looking for the GPU");
    driver_.check(driver_.retain(&context_, device_), "opening the GPU");
    try {
      use();
      driver_.check(driver_.create_stream(&stream_, 1 /* not behind the default stream */), "making a stream");
    } catch (...) {
      driver_.release(device_);
      throw;
    }
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu() override {
    driver_.set_current(context_);
    driver_.destroy_stream(stream_);
    driver_.release(device_);
  }

  void use() override { driver_.check(driver_.set_current(context_), "using the GPU"); }
  void* take(size_t bytes) override {
    Driver::Address memory = 0;
    driver_.check(driver_.allocate(&memory, std::max<size_t>(bytes, 1)), "taking memory");
    return reinterpret_cast<void*>(memory);
  }
  void give(void* memory) override { driver_.free(reinterpret_cast<Driver::Address>(memory)); }
  void* take_host(size_t bytes) override {
    void* memory = nullptr;
    driver_.check(driver_.allocate_host(&memory, std::max<size_t>(bytes, 1), 1 /* for every context */), "pinning memory");
    return memory;
  }
  void give_host(void* memory) override { driver_.free_host(memory); }
  void copy_in(void* to, const void* from, size_t bytes) override {
    driver_.check(driver_.copy_in(reinterpret_cast<Driver::Address>(to), from, bytes, stream_), "copying to the GPU");
  }
  void copy_out(void* to, const void* from, size_t bytes) override {
    driver_.check(driver_.copy_out(to, reinterpret_cast<Driver::Address>(from), bytes, stream_), "copying from the GPU");
  }
  void wait() override { driver_.check(driver_.synchronize(stream_), "waiting for the GPU"); }
  bool has_graphs() const override { return true; }

  void configure(const ort::Api& api, ort::SessionOptions* options, size_t arena_bytes, bool graphs) override {
    using A = ort::Api;
    ort::CudaOptions* made = nullptr;
    api.call(A::kCreateCudaOptions, &made);
    auto keep = api.own(A::kReleaseCudaOptions, made);
    std::vector<std::pair<std::string, std::string>> words{
        {"device_id", std::to_string(number_)},
        {"enable_cuda_graph", graphs ? "1" : "0"},
    };
    if (arena_bytes != 0) {
      words.emplace_back("gpu_mem_limit", std::to_string(arena_bytes));
      words.emplace_back("arena_extend_strategy", "kSameAsRequested");
    }
    std::vector<const char*> keys, values;
    for (const auto& [key, value] : words) keys.push_back(key.c_str()), values.push_back(value.c_str());
    api.call(A::kUpdateCudaOptions, made, static_cast<const char* const*>(keys.data()),
             static_cast<const char* const*>(values.data()), keys.size());
    api.call(A::kSetCudaOption, made, "user_compute_stream", stream_);  // after the others, which reset it
    api.call(A::kAppendCuda, options, static_cast<const ort::CudaOptions*>(made));
  }
  ort::MemoryInfo* memory(const ort::Api& api) override {
    ort::MemoryInfo* made = nullptr;
    api.call(ort::Api::kCreateMemoryInfo, "Cuda", 0 /* of a device */, number_, 0 /* default */, &made);
    return made;
  }

 private:
  const Driver& driver_;
  int number_, device_ = 0;
  void* context_ = nullptr;
  void* stream_ = nullptr;
};

}  // namespace native
