// Accounts for the store's space: what is stored, what is promised, and what the limits leave.
// RoomMaker makes room when that does not suffice (room_maker.h).
//
// The account counts physical bytes: segment files and blobs, each for its tenant (tenants share
// nothing). Catalog and ballast do not count; they stay below a few dozen MiB.
//
// Thread-safety: all methods may be called concurrently. Locks are taken in the order account,
// tree, blobs; a reservation is settled as its bytes come into the tree, so that at every moment a
// put counts once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "prefixd/result.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/catalog/tenant_bytes.h"
#include "storage/files/ballast.h"
#include "storage/files/blob_store.h"
#include "storage/files/store_options.h"
#include "storage/files/tenant_usage.h"

namespace prefixd::storage {

class SpaceAccount;

// A SpaceReservation promises bytes to data that is not in the catalog yet; its destructor gives
// them back. Move-only; must not outlive the account.
class SpaceReservation {
 public:
  SpaceReservation() = default;
  SpaceReservation(SpaceReservation&& other) noexcept { *this = std::move(other); }
  SpaceReservation& operator=(SpaceReservation&& other) noexcept;
  ~SpaceReservation() { Release(); }
  // Notes that the file system has allocated the blocks: its own count of free bytes shows them
  // now.
  void Allocated();
  void Release();
  // Gives the bytes back as `count` has the tree count them, under the account's lock. An exception
  // of `count` leaves the promise as it was.
  void Settle(const std::function<void()>& count);
  // Keeps the bytes counted until the store is closed, because the data may or may not have been
  // committed.
  void Keep();

 private:
  friend class SpaceAccount;
  SpaceAccount* account_ = nullptr;
  std::string tenant_;
  uint64_t bytes_ = 0;
  bool allocated_ = false;
};

// Tells by how many bytes each limit is exceeded; 0: it is not.
struct SpaceShortage {
  uint64_t disk = 0, store = 0, tenant = 0;
  bool any() const { return disk > 0 || store > 0 || tenant > 0; }
};

class SpaceAccount {
 public:
  // The account borrows all arguments.
  SpaceAccount(const StoreOptions& options, const PrefixTree& tree, const BlobStore& blobs,
               const Ballast& ballast)
      : options_(options), tree_(tree), blobs_(blobs), ballast_(ballast) {}

  // Reserves if all limits allow it, and returns the shortage otherwise.
  Result<SpaceShortage> TryReserve(const std::string& tenant, uint64_t bytes,
                                   SpaceReservation* out);
  // Returns kResourceExhausted with a sentence: which limit, how much is taken, what to do.
  Error Refusal(const std::string& tenant, uint64_t bytes, const SpaceShortage& shortage) const;

  // Headroom is the room still missing to keep some ready (a 32nd of each quota, and of the bytes
  // stored on the disk), so that puts need not wait for an eviction.
  struct Headroom {
    struct Part {
      uint64_t missing = 0;
      // What may go for it: what is above the quota, and twice the 32nd. A prompt that is larger is
      // worth more than the wait of a put.
      uint64_t at_most = 0;
    };
    Part store, disk;  // in the whole store, and on its disk
    std::map<std::string, Part> tenants;
  };
  Result<Headroom> MissingHeadroom() const;

  // Returns 0 where there is no quota.
  uint64_t QuotaOf(const std::string& tenant) const;
  // Lists every tenant with stored or promised bytes, or a quota of its own. The account does not
  // know evictions.
  std::vector<TenantUsage> Usage() const;

 private:
  friend class SpaceReservation;
  TenantBytes Taken() const;             // stored and reserved; needs mutex_
  Result<uint64_t> FreeForPuts() const;  // above the watermark; needs mutex_

  const StoreOptions& options_;
  const PrefixTree& tree_;
  const BlobStore& blobs_;
  const Ballast& ballast_;
  mutable std::mutex mutex_;
  TenantBytes reserved_;
  uint64_t unallocated_ = 0;  // reserved bytes that the disk does not count yet
};

}  // namespace prefixd::storage
