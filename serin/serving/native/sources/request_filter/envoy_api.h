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

enum HeaderKind { kRequestHeader = 0 };
enum BodyKind { kReceivedRequest = 0, kBufferedRequest = 1 };
enum MetadataSource { kRoute = 1 };
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
void envoy_dynamic_module_callback_http_clear_route_cache(Stream);
void envoy_dynamic_module_callback_http_send_response(Stream, uint32_t status, Header* headers, size_t count, Span body,
                                                      Span details);
}
