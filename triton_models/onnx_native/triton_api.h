// The calls of Triton's backend interface (major version 1) that the backend makes. Triton exports them itself.
#pragma once

#include <cstdint>

extern "C" {

struct TRITONSERVER_Error;
struct TRITONBACKEND_Backend;
struct TRITONBACKEND_Input;
struct TRITONBACKEND_Model;
struct TRITONBACKEND_ModelInstance;
struct TRITONBACKEND_Output;
struct TRITONBACKEND_Request;
struct TRITONBACKEND_Response;

TRITONSERVER_Error* TRITONSERVER_ErrorNew(int code, const char* text);
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error*);
const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error*);
TRITONSERVER_Error* TRITONSERVER_LogMessage(int level, const char* file, int line, const char* text);

TRITONSERVER_Error* TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor);
TRITONSERVER_Error* TRITONBACKEND_BackendArtifacts(TRITONBACKEND_Backend*, int* kind, const char** folder);
TRITONSERVER_Error* TRITONBACKEND_ModelBackend(TRITONBACKEND_Model*, TRITONBACKEND_Backend**);
TRITONSERVER_Error* TRITONBACKEND_ModelRepository(TRITONBACKEND_Model*, int* kind, const char** folder);
TRITONSERVER_Error* TRITONBACKEND_ModelVersion(TRITONBACKEND_Model*, uint64_t* version);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Model**);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceDeviceId(TRITONBACKEND_ModelInstance*, int32_t* id);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceState(TRITONBACKEND_ModelInstance*, void** state);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceSetState(TRITONBACKEND_ModelInstance*, void* state);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request*, bool success, uint64_t begin_ns, uint64_t compute_begin_ns,
    uint64_t compute_end_ns, uint64_t end_ns);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance*, uint64_t rows, uint64_t begin_ns, uint64_t compute_begin_ns, uint64_t compute_end_ns,
    uint64_t end_ns);

TRITONSERVER_Error* TRITONBACKEND_RequestInput(TRITONBACKEND_Request*, const char* name, TRITONBACKEND_Input**);
TRITONSERVER_Error* TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request*, uint32_t* count);
TRITONSERVER_Error* TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request*, uint32_t index, const char** name);
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request*, uint32_t flags);
TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input*, const char** name, int* dtype, const int64_t** shape, uint32_t* dims, uint64_t* bytes,
    uint32_t* buffers);
TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input*, uint32_t index, const void** data, uint64_t* bytes, int* memory, int64_t* device);
TRITONSERVER_Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response**, TRITONBACKEND_Request*);
TRITONSERVER_Error* TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response*);
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response*, TRITONBACKEND_Output**, const char* name, int dtype, const int64_t* shape, uint32_t dims);
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(TRITONBACKEND_Response*, uint32_t flags, TRITONSERVER_Error*);
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output*, void** data, uint64_t bytes, int* memory, int64_t* device);

}  // extern "C"

namespace triton {

enum Code { kInternal = 1, kInvalid = 3, kUnsupported = 5 };
enum Type { kUInt8 = 2, kInt8 = 6, kInt32 = 8, kInt64 = 9, kFloat = 11, kDouble = 12, kBytes = 13, kBool = 1 };
constexpr int kLogWarning = 1, kLogError = 2, kMemoryCpu = 0, kMemoryGpu = 2;
constexpr uint32_t kLast = 1, kReleaseAll = 1;

}  // namespace triton
