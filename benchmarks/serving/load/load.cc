// A load generator with a closed loop: each client has a connection and sends its next request when the last one is
// answered. One thread. Usage: load HOST PORT http|grpc CLIENTS SECONDS WARM_UP_S TIMEOUT_S PATH < requests
// The requests: for each its length (four bytes, little endian) and its bytes. Prints one line of numbers.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <memory>

#include "wire.h"

namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Client {
  std::unique_ptr<Wire> wire;
  int socket = -1;
  std::string out;  // not yet taken by the kernel
  double since = 0;
  bool asking = false;
};

class Load {
 public:
  Load(sockaddr_in address, std::vector<std::string> requests, double begin, double warm_up_s, double seconds,
       double timeout_s)
      : address_(address),
        requests_(std::move(requests)),
        measured_from_(begin + warm_up_s),
        end_(begin + warm_up_s + seconds),
        give_up_(end_ + timeout_s),
        last_(measured_from_) {}

  void add(std::unique_ptr<Wire> wire) {
    clients_.emplace_back();
    clients_.back().wire = std::move(wire);
  }

  // False: nobody listens, or a connection broke.
  bool run() {
    poll_ = epoll_create1(0);
    for (size_t index = 0; index < clients_.size(); ++index) {
      if (!connect_client(index)) return false;
    }
    for (Client& client : clients_) ask(client);
    std::vector<epoll_event> events(clients_.size());
    while (under_way_ > 0 && now_s() < give_up_) {
      int count = epoll_wait(poll_, events.data(), static_cast<int>(events.size()), 100);
      for (int index = 0; index < count; ++index) {
        if (!serve(clients_[events[static_cast<size_t>(index)].data.u64])) return false;
      }
    }
    bad_ += under_way_;
    return true;
  }

  void print() {
    std::sort(latencies_.begin(), latencies_.end());
    std::printf("%.9f %zu %zu %zu %.9f %.9f\n", std::max(last_ - measured_from_, 1e-9), all_, latencies_.size(), bad_,
                quantile(0.5), quantile(0.99));
  }

 private:
  bool connect_client(size_t index) {
    Client& client = clients_[index];
    client.socket = socket(AF_INET, SOCK_STREAM, 0);
    int on = 1;
    setsockopt(client.socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(client.socket, reinterpret_cast<sockaddr*>(&address_), sizeof address_) != 0) return false;
    fcntl(client.socket, F_SETFL, O_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLET;
    event.data.u64 = index;
    client.wire->open(client.out);
    return epoll_ctl(poll_, EPOLL_CTL_ADD, client.socket, &event) == 0;
  }

  void ask(Client& client) {
    client.since = now_s();
    if (client.since >= end_) return;
    client.wire->ask(requests_[sent_++ % requests_.size()], client.out);
    client.asking = true;
    ++under_way_;
    write_some(client);
  }

  void write_some(Client& client) {
    while (!client.out.empty()) {
      ssize_t count = send(client.socket, client.out.data(), client.out.size(), MSG_NOSIGNAL);
      if (count <= 0) return;  // EPOLLOUT follows; a broken connection is seen when it is read
      client.out.erase(0, static_cast<size_t>(count));
    }
  }

  bool serve(Client& client) {
    char buffer[1 << 16];
    for (;;) {
      ssize_t count = recv(client.socket, buffer, sizeof buffer, 0);
      if (count == 0) return !client.asking;
      if (count < 0) {
        if (errno != EAGAIN) return !client.asking;
        break;
      }
      Answer answer = client.wire->take(Text(buffer, static_cast<size_t>(count)), client.out);
      if (answer != Answer::kNone && client.asking) answered(client, answer);
      if (static_cast<size_t>(count) < sizeof buffer) break;
    }
    write_some(client);
    return true;
  }

  void answered(Client& client, Answer answer) {
    double at = now_s();
    client.asking = false;
    --under_way_;
    ++all_;
    if (client.since >= measured_from_) {
      last_ = at;
      if (answer == Answer::kGood) {
        latencies_.push_back(at - client.since);
      } else {
        ++bad_;
      }
    }
    ask(client);
  }

  double quantile(double share) const {
    if (latencies_.empty()) return 0;
    return latencies_[std::min(latencies_.size() - 1, static_cast<size_t>(share * static_cast<double>(latencies_.size())))];
  }

  sockaddr_in address_;
  std::vector<std::string> requests_;
  std::vector<Client> clients_;
  std::vector<double> latencies_;
  double measured_from_, end_, give_up_, last_;
  size_t sent_ = 0, under_way_ = 0, all_ = 0, bad_ = 0;
  int poll_ = -1;
};

std::vector<std::string> read_requests() {
  std::vector<std::string> found;
  unsigned char length[4];
  while (std::fread(length, 1, 4, stdin) == 4) {
    std::string request(size_t{length[0]} | size_t{length[1]} << 8 | size_t{length[2]} << 16 | size_t{length[3]} << 24, 0);
    if (std::fread(request.data(), 1, request.size(), stdin) != request.size()) break;
    found.push_back(std::move(request));
  }
  return found;
}

}  // namespace

int main(int count, char** words) {
  if (count != 9) return 2;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(words[2])));
  if (inet_pton(AF_INET, words[1], &address.sin_addr) != 1) return 2;
  std::vector<std::string> requests = read_requests();
  if (requests.empty()) return 2;
  Load load(address, std::move(requests), now_s(), std::atof(words[6]), std::atof(words[5]), std::atof(words[7]));
  for (int index = 0; index < std::atoi(words[4]); ++index) {
    if (std::string(words[3]) == "grpc") {
      load.add(std::make_unique<Grpc>(words[8], std::string(words[1]) + ":" + words[2]));
    } else {
      load.add(std::make_unique<Http1>());
    }
  }
  if (!load.run()) {
    std::fprintf(stderr, "a connection could not be opened, or ended before its answer\n");
    return 1;
  }
  load.print();
  return 0;
}
