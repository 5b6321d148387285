// Kills a process with kill -9 at a named point of the store's code or at a random moment. A
// process uses a store and is killed, twice or more in a row; all data that it had acknowledged
// must be there.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <mutex>
#include <set>

#include "storage/io/crash_point.h"
#include "tests/reliability/harness/harness.h"
#include "tests/reliability/harness/report.h"
#include "tests/reliability/workload/workload.h"

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;
namespace {

// Points is the state of this process's hook; a hook is a plain function.
struct Points {
  std::mutex mutex;
  Journal* journal = nullptr;
  std::set<std::string> met;
  std::string deadly;
  uint64_t hits_left = 0;
  uint64_t points_left = UINT64_MAX;  // after this many points of any name the process dies
};
Points points;

void NotePoint(const char* name) {
  const std::lock_guard lock(points.mutex);
  if (points.met.insert(name).second) points.journal->AppendText(EventKind::kPoint, name);
  if (points.deadly == name && --points.hits_left == 0) std::_Exit(0);
}

void DieAtPoint(const char* name) {
  const std::lock_guard lock(points.mutex);
  if (points.deadly == name && --points.hits_left == 0) {
    points.journal->AppendText(EventKind::kPoint, name);
    ::kill(::getpid(), SIGKILL);
  }
  if (--points.points_left == 0) ::kill(::getpid(), SIGKILL);
}

WorkloadPlan Plan(const fs::path& dir, uint64_t seed) {
  return {.dir = dir,
          .seed = seed,
          .spoil = true,
          .io = seed % 2 ? IoBackend::kThreads : IoBackend::kAuto};
}

// A process that has met this many points will hardly meet its deadly one: some are met only when a
// store is made, or when there is something to recover.
constexpr uint64_t kMostPoints = 600;

// The point at which a segment is sealed and not committed.
constexpr const char* kSealed = "put.before_commit";

// Appends a record that a power cut left torn to the end of the catalog's log.
void TearLog(const fs::path& dir, std::mt19937_64& rng) {
  fs::path log;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir / "catalog", error)) {
    if (entry.path().extension() == ".log" && entry.path() > log) log = entry.path();
  }
  if (log.empty()) return;
  const int fd = ::open(log.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  // The bytes are a checksum, length 20, the type of a full record, and bytes that do not match.
  std::array<uint8_t, 27> record;
  for (uint8_t& byte : record) byte = static_cast<uint8_t>(rng());
  record[4] = 20;
  record[5] = 0;
  record[6] = 1;
  (void)!::write(fd, record.data(), record.size());
  ::close(fd);
}

std::vector<std::string> RecordPoints() {
  const Scratch scratch;
  const fs::path dir = scratch.path() / "store";
  std::mt19937_64 rng(1);
  std::set<std::string> met;
  Truth truth;
  for (int i = 0; i < 8; ++i) {
    Journal journal;
    WorkloadPlan plan = Plan(dir, rng());
    plan.operations = 120;
    RunChild([&] {
      points.journal = &journal;
      points.deadly = i % 2 == 0 ? kSealed : "";
      points.hits_left = 10;
      crash_point_hook = NotePoint;
      Workload workload(plan, truth, journal);
      if (workload.Open()) workload.Run();
      std::_Exit(0);  // not closed: the next open has something to recover
      return 0;
    });
    for (const Event& event : journal.Take()) {
      truth.Apply(event);
      if (event.kind == EventKind::kPoint) met.insert(event.Text());
    }
    // The orphan is half a put, which no catalog names.
    std::string orphan(32, '0');
    orphan.back() = static_cast<char>('0' + i);
    RealClose(RealOpen((dir / "segments" / (orphan + ".seg")).c_str(), O_CREAT | O_WRONLY, 0600));
    if (i % 2 == 0) TearLog(dir, rng);
  }
  return {met.begin(), met.end()};
}

void KillCycle(const std::string& point, uint64_t seed, Journal& report) {
  const Scratch scratch;
  const fs::path errors = scratch.path() / "errors", dir = scratch.path() / "store";
  std::mt19937_64 rng(seed);
  Truth truth;
  Journal journal;
  // The first kill is at random, or at the point (some are met only by the process that makes the
  // store), or when a segment is sealed: then the second process has an orphan to remove or, its
  // log torn, to adopt.
  const bool adopt = point.starts_with("adopt.") || rng() % 4 == 0;
  const bool orphan = adopt || point.starts_with("recover.");
  const bool twice = rng() % 3 == 0;
  for (const bool last : {false, true}) {
    const WorkloadPlan plan = Plan(dir, rng());
    const std::string deadly = last || twice ? point : orphan ? kSealed : "";
    const uint64_t hits = 1 + rng() % (rng() % 2 ? 1 : 6);
    const bool at_point = !deadly.empty();
    Child child(
        [&] {
          if (at_point) {
            points.journal = &journal;
            points.deadly = deadly;
            points.hits_left = hits;
            points.points_left = kMostPoints;
            crash_point_hook = DieAtPoint;
          }
          Workload workload(plan, truth, journal);
          if (workload.Open()) workload.Run();
          return 1;
        },
        errors);
    // Opening takes a few milliseconds: a quarter of the kills come near it, the others mostly
    // later.
    const uint64_t moment = rng() % (rng() % 4 == 0 ? 80'000 : 20'000);
    if (!at_point && !child.WaitFor(std::chrono::microseconds(moment))) child.Kill();
    const ChildEnd end = child.Wait();
    const bool reached = Absorb(journal, truth, report, Where("kill " + point, "before the kill"));
    if (end.signal != SIGKILL) {
      report.Violation(Where("kill " + point, end.Describe() + Tail(errors)));
      return;
    }
    report.Count(1, reached ? "kills at a named point" : "kills at a random moment");
    if (reached) report.Count(1, kAtPoint + deadly);
    // The log stays whole where a tear would turn the point's orphan into a segment again.
    if ((adopt && !last) || (adopt == orphan && rng() % 3 == 0)) TearLog(dir, rng);
  }
  CheckInChild("kill " + point, dir, truth, journal, report, errors);
}

}  // namespace

Prepared PrepareKill(bool) {
  auto names = std::make_shared<std::vector<std::string>>(RecordPoints());
  const auto cycle = [names](uint64_t number, uint64_t seed, Journal& report) {
    const bool named = number % 3 != 2 && !names->empty();
    KillCycle(named ? (*names)[(number / 3 * 2 + number % 3) % names->size()] : "", seed, report);
  };
  Prepared prepared{.cycle = cycle};
  prepared.points = *names;
  return prepared;
}

}  // namespace prefixd::storage::reliability
