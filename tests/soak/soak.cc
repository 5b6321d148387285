#include "tests/soak/soak.h"
#include "base/every_page.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <utility>

#include "client_lib/remote_store.h"
#include "tests/daemon/daemon_process.h"
#include "tests/soak/client.h"
#include "tests/soak/findings.h"
#include "tests/soak/tenants.h"
#include "tests/soak/vandal.h"
#include "tests/soak/watch.h"
#include "tests/soak/world.h"

namespace prefixd::soak {
namespace {

using Clock = std::chrono::steady_clock;
using testing::DaemonDir;
using testing::DaemonProcess;

constexpr double kProgressSeconds = 10;
constexpr double kMostIdleCpu = 0.01;   // of a core
constexpr uint64_t kCachedFiles = 256;  // segment files and catalog tables that may stay open
constexpr uint64_t kSpareMappings = 256;

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

class Soak {
 public:
  Soak(const Options& options, const std::atomic<bool>& interrupted)
      : options_(options), interrupted_(interrupted), rng_(options.seed) {}

  Report Run() {
    const Status status = RunAll();
    if (!status.ok()) report_.errors.push_back(status.error().ToString());
    EndChildren();
    return std::move(report_);
  }

 private:
  struct Child {
    pid_t pid = -1;
    bool killed = false;
    std::function<void()> body;
  };

  Status RunAll() {
    tally_ = Tally::Make();
    if (tally_ == nullptr) return Error{Code::kResourceExhausted, "no shared memory"};
    Say("preparing: an embedded store answers first, then a daemon starts");
    PREFIXD_ASSIGN(world_, MakeWorld(options_.seed, options_.tenants, dir_.path() / "world"));
    PREFIXD_TRY(tenants_.Make(world_.tenants, dir_.path() / "tokens.toml"));
    StartDaemon();
    if (!daemon_->ready()) return Error{Code::kInternal, "no daemon: " + daemon_->Stderr()};
    ConnectOptions admin;
    admin.admin = true;
    admin.shared_memory = false;
    PREFIXD_ASSIGN(admin_, RemoteStore::Connect(daemon_->address(), admin));
    PREFIXD_TRY(Prepare());
    PREFIXD_TRY(Settle());
    PREFIXD_ASSIGN(const Holding before, Look(daemon_->pid()));
    PREFIXD_TRY(Work());
    PREFIXD_TRY(EndWork(before));
    if (options_.idle_seconds > 0 && !interrupted_) PREFIXD_TRY(MeasureIdle());
    admin_.reset();
    daemon_->Signal(SIGTERM);
    const int code = daemon_->Wait();
    report_.Find("exit status of the daemon", code, "", "0", code == 0);
    return {};
  }

  static void Say(const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
  // Ctrl-C reaches every process of the group; the daemon must outlast it, to be looked at.
  void StartDaemon() {
    sigset_t interrupt, old;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    ::sigprocmask(SIG_BLOCK, &interrupt, &old);
    daemon_ = std::make_unique<DaemonProcess>(
        dir_.path(), std::vector<std::string>{
                         "--listen", "127.0.0.1:0", "--max-connections", "1024", "--max-sessions",
                         std::to_string(options_.sessions + 1000), "--memory",
                         std::to_string(options_.memory_mib) + "MiB", "--tokens",
                         (dir_.path() / "tokens.toml").string(), "--hello-timeout", "2",
                         "--write-timeout", "3", "--put-idle", "10", "--log-level", "warn"});
    ::sigprocmask(SIG_SETMASK, &old, nullptr);
  }

  // Stores every prompt for every tenant, and touches all that stays for good (the tenants' parts
  // of the host tier), so that what the idle daemon holds afterwards can be told.
  Status Prepare() {
    for (size_t t = 0; t < world_.tenants.size(); ++t) {
      PREFIXD_ASSIGN(const auto store, Connect(daemon_->address(), tenants_.As(t)));
      for (const ModelSpec& model : world_.models) PREFIXD_TRY(store->RegisterModel(model));
      for (const Prompt& prompt : world_.prompts) {
        const ModelSpec& model = world_.ModelOf(prompt);
        PutSpec spec{model.name, "", prompt.tokens, "soak"};
        spec.pinned = true;
        PREFIXD_ASSIGN(auto put, store->BeginPut(spec));
        PREFIXD_TRY(WriteRows(*put, model, prompt, 256));
        PREFIXD_ASSIGN(const PutResult stored, put->Commit());
        PREFIXD_TRY(store->WaitReady(stored.prefix, {}));
        AttachSpec attach;
        attach.model = model.name;
        attach.tokens = prompt.tokens;
        attach.policy.mode = StepMode::kFull;
        PREFIXD_ASSIGN(const auto session, store->Attach(attach));
        PREFIXD_ASSIGN(const auto rows, session->ReadInPlace(0, 0, std::vector<uint32_t>{1, 2}));
      }
    }
    return {};
  }

  // Waits until nothing is left of clients and no work is queued.
  Status Settle() {
    auto until = Clock::now() + std::chrono::seconds(60);
    uint64_t queued = UINT64_MAX;
    std::string left;
    while (Clock::now() < until) {
      PREFIXD_ASSIGN(const RuntimeStats stats, admin_->Stats());
      PREFIXD_ASSIGN(const wire::ServerStats server, admin_->Server());
      uint64_t reserved = 0;
      for (const TenantStats& t : stats.tenants) reserved += t.reserved_bytes;
      left = std::to_string(stats.sessions) + " sessions, " +
             std::to_string(server.connections - 1) + " connections, " +
             std::to_string(stats.host_tier_pinned) + " pinned bytes, " + std::to_string(reserved) +
             " reserved bytes, " + std::to_string(server.shared_memory_bytes) +
             " bytes of shared memory";
      const uint64_t held = stats.sessions + server.connections - 1 + stats.host_tier_pinned +
                            reserved + server.shared_memory_bytes;
      // Queues empty at the lowest priority: as long as they do, nothing is stuck.
      const uint64_t queue = stats.ingest_queue + stats.rewrite_queue + stats.preload_queue;
      if (held + queue == 0) return {};
      if (queue < queued) until = Clock::now() + std::chrono::seconds(60);
      queued = std::min(queued, queue);
      left += ", " + std::to_string(queue) + " pieces of background work";
      ::usleep(50000);
    }
    return Error{Code::kInternal, "after a minute without clients the daemon holds " + left};
  }

  // ---- clients ----

  pid_t Fork(const std::function<void()>& body) {
    std::fflush(stdout);
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    body();
    ::_exit(0);
  }

  void StartClients() {
    const uint32_t n = std::max(1u, options_.clients);
    for (uint32_t i = 0; i < n; ++i) {
      ClientPlan plan;
      plan.tenant = tenants_.OfClient(i, n);
      plan.connect = tenants_.As(plan.tenant);
      plan.flood = plan.tenant == tenants_.flooding();
      plan.pause_ms = plan.flood ? 0 : options_.pause_ms;
      if (tenants_.size() > 1) {
        plan.other = world_.tenants[(plan.tenant + 1) % world_.tenants.size()];
      }
      plan.connect.shared_memory = i % 4 != 2;
      plan.connect.connect_timeout_ms = 30000;  // beside a flood a greeting may take its time
      plan.address = i % 2 == 1 ? daemon_->tcp_address() : daemon_->address();
      plan.sessions = std::max(1u, options_.sessions / n + (i < options_.sessions % n ? 1 : 0));
      children_.push_back({-1, false, [this, plan]() mutable {
                             plan.seed = next_seed_;
                             RunClient(world_, plan, *tally_);
                           }});
    }
    VandalPlan bad;
    bad.address = daemon_->address();
    bad.tcp_address = daemon_->tcp_address();
    bad.tenant = world_.tenants[0];
    bad.token = tenants_.As(0).token;
    bad.model = world_.ModelOf(world_.prompts[0]).name;
    bad.tokens = world_.prompts[0].tokens;
    bad.row_bytes = world_.ModelOf(world_.prompts[0]).geometry.row(0).bytes();
    for (int i = 0; i < 2; ++i) {
      children_.push_back({-1, false, [this, bad]() mutable {
                             bad.seed = next_seed_;
                             RunVandal(bad, *tally_);
                           }});
    }
    for (Child& child : children_) StartChild(child);
  }

  void StartChild(Child& child) {
    next_seed_ = rng_();
    child.killed = false;
    child.pid = Fork(child.body);
  }

  // Starts again who was killed; who ended otherwise has failed.
  void ReapAndRestart() {
    for (Child& child : children_) {
      int status = 0;
      if (child.pid <= 0 || ::waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      if (!child.killed && !tally_->stop) {
        tally_->Note("a client ended by itself, with wait status " + std::to_string(status));
        ++tally_->failed;
      }
      child.pid = -1;
      if (!tally_->stop) StartChild(child);
    }
  }

  void KillOne() {
    Child& child = children_[rng_() % children_.size()];
    if (child.pid <= 0) return;
    child.killed = true;
    ::kill(child.pid, SIGKILL);
    ++kills_;
  }

  void EndChildren() {
    for (Child& child : children_) {
      if (child.pid <= 0) continue;
      ::kill(child.pid, SIGKILL);
      ::waitpid(child.pid, nullptr, 0);
      child.pid = -1;
    }
  }

  // ---- the run ----

  Status Work() {
    StartClients();
    const auto begun = Clock::now();
    double next_kill = options_.kill_every_s, next_sample = 0, next_line = kProgressSeconds;
    std::exponential_distribution<double> pause(1 / options_.kill_every_s);
    while (!interrupted_) {
      const double now = Seconds(Clock::now() - begun);
      if (now >= options_.seconds) break;
      ReapAndRestart();
      if (now >= next_kill) {
        KillOne();
        next_kill = now + pause(rng_);
      }
      if (now >= next_sample) {
        const auto held = Look(daemon_->pid());
        if (!held.ok() || held->rss_mib == 0) {  // gone, or a zombie
          return Error{Code::kInternal, "the daemon has crashed: " + Tail(daemon_->Stderr())};
        }
        samples_.push_back({now, *held});
        next_sample = now + 1;
      }
      if (now >= next_line) {
        PREFIXD_TRY(Progress(now));
        next_line += kProgressSeconds;
      }
      ::usleep(20000);
    }
    worked_ = Seconds(Clock::now() - begun);
    if (worked_ > last_point_ + kProgressSeconds / 2) {
      tenants_.Sample(worked_, tally_->steps, report_.tenants);
    }
    return {};
  }

  static std::string Tail(const std::string& text) {
    return text.size() > 2000 ? text.substr(text.size() - 2000) : text;
  }

  Status Progress(double now) {
    tenants_.Sample(now, tally_->steps, report_.tenants);
    last_point_ = now;
    PREFIXD_ASSIGN(const RuntimeStats stats, admin_->Stats());
    PrintProgress(now, stats);
    return {};
  }

  void PrintProgress(double now, const RuntimeStats& stats) {
    const Tally& t = *tally_;
    const Holding& h = samples_.back().held;
    const size_t ago = std::min<size_t>(samples_.size() - 1, 10);
    const auto& then = samples_[samples_.size() - 1 - ago];
    const double span = std::max(samples_.back().at - then.at, 1e-9);
    const uint64_t total = t.total();
    const auto n = [](uint64_t count) { return std::to_string(count); };
    char rate[32], memory[96], cores[32];
    std::snprintf(rate, sizeof(rate), "%.0f/s",
                  static_cast<double>(total - last_total_) / kProgressSeconds);
    std::snprintf(memory, sizeof(memory), "%.0f MiB (%.0f anonymous, %.0f shared)", h.rss_mib,
                  h.anonymous_mib, h.shared_mib);
    std::snprintf(cores, sizeof(cores), "%.2f cores",
                  (h.cpu_seconds - then.held.cpu_seconds) / span);
    Say("[" + n(static_cast<uint64_t>(now)) + " s] " + n(total) + " calls (" + rate + "), " +
        n(stats.sessions) + " sessions; " + n(t.compared) + " answers, " + n(t.wrong) + " wrong, " +
        n(t.failed) + " failed, " + n(t.shed) + " shed; " + n(kills_) + " killed; daemon " +
        memory + ", " + n(h.sockets + h.memory_files + h.files) + " descriptors, " + n(h.mappings) +
        " mappings, " + cores);
    last_total_ = total;
  }

  Status EndWork(const Holding& before) {
    Say("the clients end");
    tally_->stop = true;
    const auto until = Clock::now() + std::chrono::seconds(60);
    const auto running = [&] {
      return std::ranges::any_of(children_, [](const Child& c) { return c.pid > 0; });
    };
    while (running() && Clock::now() < until) {
      ReapAndRestart();
      ::usleep(20000);
    }
    if (running()) {
      ++tally_->failed;
      tally_->Note("clients that did not end within a minute were killed");
    }
    EndChildren();
    PREFIXD_ASSIGN(const wire::ServerStats server, admin_->Server());
    AddFindings(*tally_, server, samples_, worked_, kills_, options_.memory_mib, report_);
    tenants_.Finish(tally_->steps, report_);
    PREFIXD_TRY(Settle());
    PREFIXD_ASSIGN(const Holding after, Look(daemon_->pid()));
    const auto same = [&](const char* name, uint64_t now, uint64_t then) {
      report_.Find(name, double(now), "", "as before: " + std::to_string(then), now == then);
    };
    same("sockets, idle again", after.sockets, before.sockets);
    same("memory files, idle again", after.memory_files, before.memory_files);
    same("mappings of memory files, idle again", after.memory_mappings, before.memory_mappings);
    report_.FindAtMost("threads, idle again", double(after.threads), "",
                       double(before.threads + 8));
    report_.FindAtMost("other descriptors, idle again", double(after.files), "",
                       double(before.files + kCachedFiles));
    report_.FindAtMost("mappings, idle again", double(after.mappings), "",
                       double(before.mappings + kSpareMappings));
    report_.Find("resident before, idle", before.rss_mib, "MiB");
    report_.Find("resident afterwards, idle", after.rss_mib, "MiB");
    return {};
  }

  Status MeasureIdle() {
    Say("the idle daemon is measured with " + std::to_string(options_.idle_sessions) +
        " sessions attached");
    std::vector<std::unique_ptr<Store>> stores;
    std::vector<std::shared_ptr<Session>> sessions;
    for (uint32_t i = 0; i < options_.idle_sessions; ++i) {
      if (i % 10 == 0) {
        PREFIXD_ASSIGN(stores.emplace_back(), Connect(daemon_->address(), tenants_.As(i / 10)));
      }
      const Prompt& prompt = world_.prompts[i % world_.prompts.size()];
      AttachSpec spec;
      spec.model = world_.ModelOf(prompt).name;
      spec.tokens = prompt.tokens;
      spec.policy = world_.policies[i % world_.policies.size()];
      PREFIXD_ASSIGN(const auto session, stores.back()->Attach(spec));
      sessions.push_back(session);
    }
    // What clients left behind expires, and is removed in the background.
    const auto until = Clock::now() + std::chrono::seconds(60);
    while (Clock::now() < until && !interrupted_) {
      PREFIXD_ASSIGN(const auto prefixes, EveryPrefix(*admin_));
      if (prefixes.size() <= world_.tenants.size() * world_.prompts.size()) break;
      ::usleep(500000);
    }
    ::sleep(2);
    PREFIXD_ASSIGN(const Holding begun, Look(daemon_->pid()));
    const auto at = Clock::now();
    while (Seconds(Clock::now() - at) < options_.idle_seconds && !interrupted_) ::usleep(100000);
    PREFIXD_ASSIGN(const Holding ended, Look(daemon_->pid()));
    const double used = (ended.cpu_seconds - begun.cpu_seconds) / Seconds(Clock::now() - at);
    report_.FindAtMost(
        "idle, " + std::to_string(options_.idle_sessions) + " sessions: share of a core", used,
        "of 1", kMostIdleCpu);
    return {};
  }

  const Options options_;
  const std::atomic<bool>& interrupted_;
  std::mt19937_64 rng_;
  Report report_;
  DaemonDir dir_;
  World world_;
  Tenants tenants_;
  Tally* tally_ = nullptr;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<RemoteStore> admin_;
  std::vector<Child> children_;
  uint64_t next_seed_ = 0, kills_ = 0, last_total_ = 0;
  double worked_ = 0, last_point_ = 0;
  std::vector<Sample> samples_;
};

}  // namespace

Report RunSoak(const Options& options, const std::atomic<bool>& interrupted) {
  return Soak(options, interrupted).Run();
}

}  // namespace prefixd::soak
