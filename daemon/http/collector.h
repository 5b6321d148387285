// Makes the answers that ask the store, on a thread of its own: a slow disk must hold up neither
// the thread of the sockets nor what carries out calls.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "daemon/http/message.h"
#include "daemon/watch/status.h"
#include "daemon/watch/watch.h"
#include "prefixd/store.h"

namespace prefixd::daemon {

class Collector {
 public:
  enum class What : uint8_t { kMetrics, kStatus, kReady };
  using Done = std::function<void(HttpAnswer)>;  // called on the collector's thread
  static constexpr size_t kMostWaiting = 64;

  // The store must outlive Stop. `server` may be called on any thread.
  Collector(Store& store, std::filesystem::path dir, const Watch& watch,
            std::function<wire::ServerStats()> server);
  ~Collector() { Stop(); }

  // False: too many answers are waited for.
  bool Ask(What what, const Viewer& viewer, Done done);
  // From now on the daemon is not ready.
  void SetStopping();
  // Ends the thread behind the answer that it makes now; `done` of those that wait is not called.
  void Stop();

 private:
  struct Asked {
    What what;
    Viewer viewer;
    Done done;
  };
  using Clock = std::chrono::steady_clock;
  struct Kept {
    Clock::time_point made;
    HttpAnswer answer;
  };

  void Work();
  HttpAnswer Make(What what, const Viewer& viewer);
  HttpAnswer Metrics(const Viewer& viewer);
  HttpAnswer Status(const Viewer& viewer);
  // Counts the prefixes of each tenant that the viewer may see; none where there are too many.
  std::map<std::string, uint64_t> Prefixes(const Viewer& viewer);
  // Why the daemon does not serve; "": it does.
  std::string NotReady() const;

  Store& store_;
  const std::filesystem::path dir_;
  const Watch& watch_;
  const std::function<wire::ServerStats()> server_;
  // Its thread only.
  std::map<std::pair<int, std::string>, Kept> kept_;
  std::map<std::string, uint64_t> prefixes_;  // of all tenants
  Clock::time_point prefixes_counted_{};

  mutable std::mutex mutex_;
  std::condition_variable wanted_;
  std::deque<Asked> asked_;
  bool stopping_ = false, ended_ = false;
  std::thread thread_;  // last: it uses the others
};

// Tries whether a file can be written in the store's directory; it never gets a name.
prefixd::Status TryToWrite(const std::filesystem::path& dir);

}  // namespace prefixd::daemon
