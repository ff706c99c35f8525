// Loaded before Triton's own libraries. It keeps cancelled gRPC calls from ending Triton, and lets them end.
//
// Triton 2.51 exits when a gRPC call is cancelled at the moment it is answered. The gateway cannot keep a cancellation to
// itself: it resets the stream. So the frame that resets a stream (RST_STREAM) becomes one that only says that the client
// sends nothing more: trailers (HEADERS with END_STREAM). Which of these is meant, gRPC knows best:
//
// - A stream whose body is whole has been ended by its client before. gRPC skips what comes after that, so the call is
//   computed and answered as if nobody had given it up, and its memory is freed with the answer.
// - A stream whose body is not whole ends here with a truncated message. gRPC drops it with all that came of it, and
//   Triton never sees the call. (If such a reset were hidden, gRPC would keep these bytes until the connection closes.)
//
// The frame keeps its length and its stream, so each byte is decided when it is read, however the reads cut the frames.

#include <dlfcn.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

namespace {

constexpr int kMostFiles = 1 << 16, kPreface = 24, kHeader = 9;
constexpr uint8_t kReset = 0x3, kHeaders = 0x1, kEndStreamAndHeaders = 0x5;
// "accept-encoding: gzip, deflate" in HPACK's static table: one byte that is a whole field, leaves the table of the
// connection as it is, and means nothing in trailers. A reset carries four bytes, its reason.
constexpr uint8_t kField = 0x90;

// Where in the frames a connection is; only its own thread reads it.
struct Reading {
  bool watched;
  uint32_t skip;    // bytes until the next frame begins
  uint32_t length;  // of the frame whose header is being read
  uint8_t header;   // bytes of it that were read
  bool reset;       // whether this frame resets a stream
};

Reading readings[kMostFiles];

int watched_port() {
  static const int port = [] {
    const char* text = getenv("SERIN_GRPC_PORT");
    return text == nullptr ? -1 : atoi(text);
  }();
  return port;
}

void begin(int file) {
  if (file < 0 || file >= kMostFiles) return;
  sockaddr_storage place{};
  socklen_t size = sizeof(place);
  int port = -1;
  if (getsockname(file, reinterpret_cast<sockaddr*>(&place), &size) == 0) {
    if (place.ss_family == AF_INET) port = ntohs(reinterpret_cast<sockaddr_in&>(place).sin_port);
    if (place.ss_family == AF_INET6) port = ntohs(reinterpret_cast<sockaddr_in6&>(place).sin6_port);
  }
  readings[file] = {port == watched_port(), kPreface, 0, 0, false};
}

void look(Reading& reading, uint8_t* data, size_t size) {
  for (size_t at = 0; at < size;) {
    if (reading.skip != 0) {
      size_t step = reading.skip < size - at ? reading.skip : size - at;
      if (reading.reset) memset(data + at, kField, step);
      reading.skip -= uint32_t(step);
      at += step;
      continue;
    }
    if (reading.header < 3) reading.length = reading.length << 8 | data[at];
    if (reading.header == 3) reading.reset = data[at] == kReset;
    if (reading.reset && reading.header == 3) data[at] = kHeaders;
    if (reading.reset && reading.header == 4) data[at] = kEndStreamAndHeaders;
    at += 1;
    if (++reading.header == kHeader) {
      reading.skip = reading.length;
      reading.length = 0;
      reading.header = 0;
    }
  }
}

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int accept(int listener, sockaddr* place, socklen_t* size) {
  static const auto real = next<int (*)(int, sockaddr*, socklen_t*)>("accept");
  int file = real(listener, place, size);
  begin(file);
  return file;
}

int accept4(int listener, sockaddr* place, socklen_t* size, int flags) {
  static const auto real = next<int (*)(int, sockaddr*, socklen_t*, int)>("accept4");
  int file = real(listener, place, size, flags);
  begin(file);
  return file;
}

int close(int file) {
  static const auto real = next<int (*)(int)>("close");
  if (file >= 0 && file < kMostFiles) readings[file].watched = false;  // its number may become another one's
  return real(file);
}

ssize_t recvmsg(int file, msghdr* message, int flags) {
  static const auto real = next<ssize_t (*)(int, msghdr*, int)>("recvmsg");
  ssize_t got = real(file, message, flags);
  if (got <= 0 || file < 0 || file >= kMostFiles || !readings[file].watched || (flags & MSG_PEEK)) return got;
  size_t left = size_t(got);
  for (size_t index = 0; index < message->msg_iovlen && left != 0; ++index) {
    iovec& part = message->msg_iov[index];
    size_t size = part.iov_len < left ? part.iov_len : left;
    look(readings[file], static_cast<uint8_t*>(part.iov_base), size);
    left -= size;
  }
  return got;
}

}  // extern "C"
#pragma GCC visibility pop
