// One budget for the memory of a process's store: whatever grows with its use takes its bytes here
// first, by kind and by tenant. Who finds no room first makes others give back what they can do
// without (pages of the host tier, keys of idle prefixes, open files), and is refused with
// kResourceExhausted and a time to retry when that is not enough.
//
// Thread-safety: all methods may be called concurrently, except those of one MemoryCharge. Counting
// takes atomic additions and no lock; a lock is taken for a new account and when memory is short.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"

namespace prefixd {

enum class MemoryKind : uint8_t {
  kHostTier,      // pages, with what finds them
  kTables,        // checksums, token ids and row orders of open segments
  kSessions,      // plans and ledgers, queries that retention policies look at
  kOwnTokens,     // rows that sessions appended, and those that policies retain of what moved
  kSummaries,     // of estimators, with feature maps, clusters and features of tokens; scorers
  kIndexes,       // codes and lists
  kKeys,          // exact keys and anchors of attached prefixes
  kSharedSets,    // what steps left to later ones
  kGatheredRows,  // copies of the rows of shared sets
  kScratch,       // buffers of steps
  kReads,         // buffers of reads
  kPuts,          // buffers of puts and rewriting
  kIngest,        // making summaries and indexes in the background
  kMessages,      // requests and replies of the daemon
  kRegions,       // shared memory of connections
  kCatalog,       // the database
  kReserve,       // the program itself, and the slack of its allocator
};
inline constexpr size_t kMemoryKinds = 17;
std::string_view MemoryKindName(MemoryKind kind);  // "host_tier"

class MemoryBudget;
struct MemoryOwner;  // whose memory is counted

// Counts some bytes of one kind until it is destroyed or released. Move-only. An empty charge
// counts nothing.
class MemoryCharge {
 public:
  MemoryCharge() = default;
  MemoryCharge(MemoryCharge&& other) noexcept { *this = std::move(other); }
  MemoryCharge& operator=(MemoryCharge&& other) noexcept;
  ~MemoryCharge() { Release(); }

  uint64_t bytes() const { return bytes_; }
  // Makes the charge this large. Smaller always works; larger as MemoryAccount's Take and TryTake.
  // After a refusal the charge is as it was.
  Status Resize(uint64_t bytes);
  bool TryResize(uint64_t bytes);
  // Counts this much whether there is room or not: for what exists already.
  void Set(uint64_t bytes);
  void Release();

 private:
  friend class MemoryAccount;
  MemoryCharge(std::shared_ptr<MemoryOwner> owner, MemoryKind kind)
      : owner_(std::move(owner)), kind_(kind) {}

  std::shared_ptr<MemoryOwner> owner_;
  MemoryKind kind_ = MemoryKind::kReserve;
  uint64_t bytes_ = 0;
};

// Takes memory for one tenant, or for all together. A default account counts and refuses nothing.
// Copies are the same account.
class MemoryAccount {
 public:
  MemoryAccount() = default;

  // Others give back first when there is no room. kResourceExhausted with Error::retry_after_ms
  // (0: more than there ever is). The caller may hold locks that no GiveBack takes.
  Result<MemoryCharge> Take(MemoryKind kind, uint64_t bytes) const;
  // Disturbs nobody: nullopt when there is no room now.
  std::optional<MemoryCharge> TryTake(MemoryKind kind, uint64_t bytes) const;
  // Counts what exists already, or must.
  MemoryCharge Charge(MemoryKind kind, uint64_t bytes = 0) const;

 private:
  friend class MemoryBudget;
  explicit MemoryAccount(std::shared_ptr<MemoryOwner> owner) : owner_(std::move(owner)) {}
  std::shared_ptr<MemoryOwner> owner_;
};

class MemoryBudget : public std::enable_shared_from_this<MemoryBudget> {
 public:
  struct Options {
    uint64_t capacity = 0;
    uint64_t reserve = 0;     // the part that is counted as kReserve from the beginning
    double tenant_share = 1;  // of the capacity: what a tenant may hold beside the host tier
  };
  static std::shared_ptr<MemoryBudget> Create(const Options& options);

  MemoryAccount Shared();
  MemoryAccount Of(std::string_view tenant);

  // Gives back some memory that its owner can do without, `bytes` if it can: of `tenant` alone
  // unless that is null. Returns whether it gave any. Takes no memory itself.
  using GiveBack = std::function<bool(uint64_t bytes, const std::string* tenant)>;
  // While it lives, its function is called when memory is short, first registered first. The
  // destructor waits for a call that runs.
  class Giver {
   public:
    Giver() = default;
    Giver(Giver&& other) noexcept { *this = std::move(other); }
    Giver& operator=(Giver&& other) noexcept;
    ~Giver() { Withdraw(); }

   private:
    friend class MemoryBudget;
    void Withdraw();
    std::shared_ptr<MemoryBudget> budget_;
    std::list<GiveBack>::iterator at_;
  };
  [[nodiscard]] Giver OnShortage(GiveBack give_back);

  uint64_t capacity() const { return options_.capacity; }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t used(MemoryKind kind) const {
    return kinds_[static_cast<size_t>(kind)].load(std::memory_order_relaxed);
  }
  // What a tenant may hold beside the host tier, whose shares are its own.
  uint64_t tenant_capacity() const { return tenant_capacity_; }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  struct Tenant {
    std::string tenant;
    uint64_t bytes = 0;  // beside the host tier
    uint64_t host_tier = 0;
    uint64_t refused = 0;  // calls
  };
  std::vector<Tenant> tenants() const;

 private:
  friend class MemoryCharge;
  explicit MemoryBudget(const Options& options);
  // Counts more bytes of `owner`, or counts nothing and returns false.
  bool Add(MemoryOwner& owner, MemoryKind kind, uint64_t bytes);
  void AddAnyway(MemoryOwner& owner, MemoryKind kind, uint64_t bytes);
  void Subtract(MemoryOwner& owner, MemoryKind kind, uint64_t bytes);
  // Tries again as long as others give back.
  Status AddBySqueezing(MemoryOwner& owner, MemoryKind kind, uint64_t bytes);
  bool Squeeze(MemoryOwner& owner, MemoryKind kind, uint64_t bytes);
  Error Refuse(MemoryOwner& owner, MemoryKind kind, uint64_t bytes);

  const Options options_;
  const uint64_t tenant_capacity_;
  std::atomic<uint64_t> used_{0}, refused_{0};
  std::array<std::atomic<uint64_t>, kMemoryKinds> kinds_{};

  std::mutex squeeze_mutex_;  // one giver at a time; guards givers_
  std::list<GiveBack> givers_;
  mutable std::mutex owners_mutex_;
  std::map<std::string, std::weak_ptr<MemoryOwner>, std::less<>> owners_;
};

}  // namespace prefixd
