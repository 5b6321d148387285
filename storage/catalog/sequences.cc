#include "storage/catalog/sequences.h"

#include <algorithm>
#include <cstring>

namespace prefixd::storage {

SequenceTicket::~SequenceTicket() {
  if (owner_ != nullptr) owner_->Decide(number_);
}

SequenceTicket Sequences::Next() {
  std::lock_guard lock(mutex_);
  undecided_.insert(++highest_);
  return {this, highest_};
}

void Sequences::Decide(uint64_t number) {
  std::lock_guard lock(mutex_);
  undecided_.erase(number);
}

void Sequences::Saw(uint64_t number) {
  std::lock_guard lock(mutex_);
  highest_ = std::max(highest_, number);
}

void Sequences::FoundUndecided(uint64_t number) {
  std::lock_guard lock(mutex_);
  highest_ = std::max(highest_, number);
  undecided_.insert(number);
}

std::string Sequences::Row(std::span<const uint64_t> deciding) const {
  std::lock_guard lock(mutex_);
  std::string row;
  const auto append = [&row](uint64_t number) {
    row.append(reinterpret_cast<const char*>(&number), sizeof(number));
  };
  append(highest_);
  for (const uint64_t number : undecided_) {
    if (std::find(deciding.begin(), deciding.end(), number) == deciding.end()) append(number);
  }
  return row;
}

Status Sequences::Restore(std::string_view row) {
  std::lock_guard lock(mutex_);
  if (row.empty()) return {};
  if (row.size() % sizeof(uint64_t) != 0) {
    return Error{Code::kCorrupt, "catalog: the row of sequence numbers is malformed"};
  }
  const auto number = [row](size_t i) {
    uint64_t value = 0;
    std::memcpy(&value, row.data() + i * sizeof(value), sizeof(value));
    return value;
  };
  highest_ = std::max(highest_, number(0));
  restored_highest_ = number(0);
  restored_undecided_.clear();
  for (size_t i = 1; i < row.size() / sizeof(uint64_t); ++i) restored_undecided_.insert(number(i));
  return {};
}

bool Sequences::WasDecided(uint64_t number) const {
  std::lock_guard lock(mutex_);
  return number <= restored_highest_ && !restored_undecided_.contains(number);
}

}  // namespace prefixd::storage
