#include "daemon/http/collector.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/capture_errors.h"
#include "daemon/http/metrics.h"
#include "daemon/limits/with_memory.h"

namespace prefixd::daemon {
namespace {

// Readers that ask more often get the same again, and cost the store nothing.
constexpr auto kFresh = std::chrono::milliseconds(500);
constexpr size_t kMostKept = 32;
// Prefixes are counted by listing them, so now and then and up to so many pages.
constexpr auto kPrefixesFresh = std::chrono::seconds(10);
constexpr size_t kMostPages = 20;

}  // namespace

prefixd::Status TryToWrite(const std::filesystem::path& dir) {
  const auto failed = [&](int error) {
    return Error{Code::kIo, "cannot write in " + dir.string() + ": " + std::strerror(error)};
  };
  const int fd = ::open(dir.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) {
    // Some file systems have no files without a name.
    if (errno != EOPNOTSUPP && errno != EISDIR) return failed(errno);
    return ::access(dir.c_str(), W_OK) == 0 ? prefixd::Status() : failed(errno);
  }
  const std::array<char, 4096> page{};
  const ssize_t written = ::write(fd, page.data(), page.size());
  const int error = errno;
  ::close(fd);
  if (written != static_cast<ssize_t>(page.size())) return failed(written < 0 ? error : ENOSPC);
  return {};
}

Collector::Collector(Store& store, std::filesystem::path dir, const Watch& watch,
                     std::function<wire::ServerStats()> server)
    : store_(store),
      dir_(std::move(dir)),
      watch_(watch),
      server_(std::move(server)),
      thread_([this] { Work(); }) {}

bool Collector::Ask(What what, const Viewer& viewer, Done done) {
  std::lock_guard lock(mutex_);
  if (ended_ || asked_.size() >= kMostWaiting) return false;
  asked_.push_back({what, viewer, std::move(done)});
  wanted_.notify_one();
  return true;
}

void Collector::SetStopping() {
  std::lock_guard lock(mutex_);
  stopping_ = true;
}

void Collector::Stop() {
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    wanted_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Collector::Work() {
  while (true) {
    Asked asked;
    {
      std::unique_lock lock(mutex_);
      wanted_.wait(lock, [this] { return ended_ || !asked_.empty(); });
      if (ended_) return;
      asked = std::move(asked_.front());
      asked_.pop_front();
    }
    std::optional<HttpAnswer> answer;  // to make one takes memory
    const prefixd::Status made = CaptureErrors([&]() -> prefixd::Status {
      answer = Make(asked.what, asked.viewer);
      return {};
    });
    if (!made.ok()) {
      answer = WithMemory([&] { return TextAnswer(503, made.error().message); });
    }
    asked.done(*std::move(answer));
  }
}

HttpAnswer Collector::Make(What what, const Viewer& viewer) {
  if (what == What::kReady) {
    const std::string why = NotReady();
    return why.empty() ? TextAnswer(200, "ready") : TextAnswer(503, why);
  }
  const std::pair key(static_cast<int>(what) * 4 + static_cast<int>(viewer.sees), viewer.tenant);
  const auto now = Clock::now();
  std::erase_if(kept_, [&](const auto& entry) { return now - entry.second.made >= kFresh; });
  if (const auto it = kept_.find(key); it != kept_.end()) return it->second.answer;
  HttpAnswer answer = what == What::kMetrics ? Metrics(viewer) : Status(viewer);
  if (kept_.size() < kMostKept) kept_[key] = {Clock::now(), answer};
  return answer;
}

HttpAnswer Collector::Metrics(const Viewer& viewer) {
  auto stats = store_.Stats();
  if (!stats.ok()) return TextAnswer(503, stats.error().message);
  KeepVisible(viewer, &*stats);
  const auto tenant =
      viewer.sees == Viewer::Sees::kAll ? std::nullopt : std::optional<std::string>(viewer.tenant);
  HttpAnswer answer;
  answer.type = "text/plain; version=0.0.4; charset=utf-8";
  answer.body = MetricsText({viewer, server_(), *stats, watch_.Take(tenant), Prefixes(viewer),
                             /*ready=*/NotReady().empty()});
  return answer;
}

std::map<std::string, uint64_t> Collector::Prefixes(const Viewer& viewer) {
  if (viewer.sees == Viewer::Sees::kTotals) return {};
  if (const auto now = Clock::now(); now - prefixes_counted_ >= kPrefixesFresh) {
    prefixes_counted_ = now;
    prefixes_.clear();
    ListSpec spec;
    for (size_t page = 0; page == 0 || !spec.after.empty(); ++page) {
      const auto listed = store_.ListPrefixes(spec);
      if (!listed.ok() || page == kMostPages) {
        prefixes_.clear();
        break;
      }
      for (const PrefixSummary& s : listed->prefixes) ++prefixes_[s.tenant];
      spec.after = listed->next;
    }
  }
  if (viewer.sees == Viewer::Sees::kAll) return prefixes_;
  const auto it = prefixes_.find(viewer.tenant);
  return {{viewer.tenant, it == prefixes_.end() ? 0 : it->second}};
}

HttpAnswer Collector::Status(const Viewer& viewer) {
  const wire::Json json = StatusJson(store_, watch_, server_(), viewer);
  HttpAnswer answer;
  answer.type = "application/json";
  answer.body = json.dump(-1, ' ', false, wire::Json::error_handler_t::replace);
  return answer;
}

std::string Collector::NotReady() const {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return "the daemon is stopping";
  }
  if (const auto stats = store_.Stats(); !stats.ok()) return stats.error().message;
  if (const prefixd::Status s = TryToWrite(dir_); !s.ok()) return s.error().message;
  return "";
}

}  // namespace prefixd::daemon
