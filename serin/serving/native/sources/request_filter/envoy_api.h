// The part of Envoy's interface for dynamic modules that is used here, as of Envoy 1.40: a C interface, by value and
// pointer, whose functions Envoy's own program exports.

#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct Span {  // of bytes, whoever owns them
  const char* data;
  size_t size;
};

struct Header {
  const char* key;
  size_t key_size;
  const char* value;
  size_t value_size;
};

using Stream = void*;  // one request, as Envoy knows it

struct Timing {  // in nanoseconds since the start, which is since 1970; each value counts where its flag is set
  int64_t start, connected, handshake_begun, handshake_ended, headers_received, received, upstream_begun,
      upstream_connected, upstream_handshake, upstream_first_sent, upstream_last_sent, upstream_first_received,
      upstream_body_received, upstream_last_received, first_sent, last_sent, last_acknowledged, complete, closed;
  bool has_start, has_before[4], has_received, has_upstream[8], has_first_sent, has_last_sent, has_others[3];
};

enum HeaderKind { kRequestHeader = 0, kResponseHeader = 2, kResponseTrailer = 3 };
enum BodyKind { kReceivedRequest = 0, kBufferedRequest = 1, kReceivedResponse = 2 };
enum MetadataSource { kRoute = 1, kHost = 3 };
enum LogLevel { kWarning = 3 };
enum CalloutResult { kCalloutDone = 0 };  // others: no answer came, or one that is too large
enum HeadersStatus { kHeadersContinue = 0, kHeadersStop = 1 };
enum BodyStatus { kBodyContinue = 0, kBodyStopAndBuffer = 1 };
enum TrailersStatus { kTrailersContinue = 0, kTrailersStop = 1 };

bool envoy_dynamic_module_callback_http_get_header(Stream, HeaderKind, Span key, Span* found, size_t index,
                                                   size_t* count);
size_t envoy_dynamic_module_callback_http_get_headers_size(Stream, HeaderKind);
bool envoy_dynamic_module_callback_http_get_headers(Stream, HeaderKind, Header* found);
bool envoy_dynamic_module_callback_http_set_header(Stream, HeaderKind, Span key, Span value);
bool envoy_dynamic_module_callback_http_add_header(Stream, HeaderKind, Span key, Span value);
size_t envoy_dynamic_module_callback_http_get_body_size(Stream, BodyKind);
size_t envoy_dynamic_module_callback_http_get_body_chunks_size(Stream, BodyKind);
bool envoy_dynamic_module_callback_http_get_body_chunks(Stream, BodyKind, Span* chunks);
bool envoy_dynamic_module_callback_http_received_buffered_request_body(Stream);
bool envoy_dynamic_module_callback_http_append_body(Stream, BodyKind, Span);
bool envoy_dynamic_module_callback_http_drain_body(Stream, BodyKind, size_t);
bool envoy_dynamic_module_callback_http_get_metadata_number(Stream, MetadataSource, Span space, Span key,
                                                            double* found);
bool envoy_dynamic_module_callback_http_get_metadata_string(Stream, MetadataSource, Span space, Span key, Span* found);
void envoy_dynamic_module_callback_http_get_timing_info(Stream, Timing* found);
const void* envoy_dynamic_module_callback_get_most_specific_route_config(Stream);
uint32_t envoy_dynamic_module_callback_http_filter_get_worker_index(Stream);
uint32_t envoy_dynamic_module_callback_get_concurrency();
void envoy_dynamic_module_callback_log(LogLevel, Span);
void envoy_dynamic_module_callback_http_clear_route_cache(Stream);
int envoy_dynamic_module_callback_http_filter_http_callout(Stream, uint64_t* id, Span cluster, Header* headers,
                                                           size_t count, Span body, uint64_t timeout_ms);
void envoy_dynamic_module_callback_http_filter_continue_decoding(Stream);
void envoy_dynamic_module_callback_http_send_response(Stream, uint32_t status, Header* headers, size_t count, Span body,
                                                      Span details);
}
