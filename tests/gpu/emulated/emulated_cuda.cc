#include <ucontext.h>

#include <cstdio>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "tests/gpu/emulated/emulated_cuda.h"

namespace prefixd::gpu::emulated {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr uint32_t kWarpSize = 32;

enum class Wait { kNone, kWarp, kBlock, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<std::byte[]> stack = std::make_unique<std::byte[]>(kStackBytes);
  Index index;
  Wait wait = Wait::kNone;
  bool odd = false;  // parity of the next exchange
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
  std::vector<Copy> copies;  // begun, not waited for
};

// The one block that is running.
struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Slot> slots;  // [2][threads]
  std::vector<float> shared = std::vector<float>(kDynamicSharedBytes / sizeof(float));
  Index index;
  Fiber* running = nullptr;
  const std::function<void()>* body = nullptr;
  uint64_t seed = 0;
};
Block& TheBlock() {
  static Block block;
  return block;
}

void FiberMain() {
  Block& block = TheBlock();
  (*block.body)();
  block.running->wait = Wait::kDone;
  swapcontext(&block.running->context, &block.scheduler);
}

void Start(Fiber& fiber, uint32_t thread) {
  fiber.index = {thread, 0, 0};
  fiber.wait = Wait::kNone;
  fiber.odd = false;
  fiber.copies.clear();
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, FiberMain, 0);
}

void Pause(Wait wait) {
  Block& block = TheBlock();
  block.running->wait = wait;
  swapcontext(&block.running->context, &block.scheduler);
}

// Lets go whoever waits for something that all have reached. False: nobody can go on.
bool Release(Block& block) {
  bool released = false;
  for (size_t warp = 0; warp < block.fibers.size(); warp += kWarpSize) {
    const auto first = block.fibers.begin() + warp, last = first + kWarpSize;
    if (std::all_of(first, last, [](const Fiber& f) { return f.wait == Wait::kWarp; })) {
      std::for_each(first, last, [](Fiber& f) { f.wait = Wait::kNone; });
      released = true;
    }
  }
  if (released) return true;
  const auto at_barrier = [](const Fiber& f) { return f.wait == Wait::kBlock; };
  if (!std::all_of(block.fibers.begin(), block.fibers.end(), at_barrier)) return false;
  for (Fiber& fiber : block.fibers) fiber.wait = Wait::kNone;
  return true;
}

bool RunBlock(Block& block, std::mt19937_64& random) {
  std::fill(block.shared.begin(), block.shared.end(), std::numeric_limits<float>::quiet_NaN());
  for (uint32_t t = 0; t < block.fibers.size(); ++t) Start(block.fibers[t], t);
  std::vector<uint32_t> order(block.fibers.size());
  std::iota(order.begin(), order.end(), 0u);
  while (true) {
    std::shuffle(order.begin(), order.end(), random);
    for (const uint32_t t : order) {
      Fiber& fiber = block.fibers[t];
      if (fiber.wait != Wait::kNone) continue;
      block.running = &fiber;
      swapcontext(&block.scheduler, &fiber.context);
    }
    const auto done = [](const Fiber& f) { return f.wait == Wait::kDone; };
    if (std::all_of(block.fibers.begin(), block.fibers.end(), done)) return true;
    if (!Release(block)) {
      std::printf("emulated block (%u, %u): threads wait for different things\n", block.index.x,
                  block.index.y);
      return false;
    }
  }
}

}  // namespace

const Index& ThreadIndex() { return TheBlock().running->index; }
const Index& BlockIndex() { return TheBlock().index; }
float* DynamicShared() { return TheBlock().shared.data(); }
void BlockBarrier() { Pause(Wait::kBlock); }
void WarpBarrier() { Pause(Wait::kWarp); }

Slot& ExchangeSlot(uint32_t lane, bool odd) {
  Block& block = TheBlock();
  const size_t warp_begin = block.running->index.x / kWarpSize * kWarpSize;
  return block.slots[(odd ? block.fibers.size() : 0) + warp_begin + lane];
}
bool NextExchangeIsOdd() {
  Fiber& fiber = *TheBlock().running;
  fiber.odd = !fiber.odd;
  return fiber.odd;
}

void BeginCopy(void* to, const void* from, size_t bytes) {
  TheBlock().running->copies.push_back({to, from, bytes});
}
void FinishCopies() {
  for (const Fiber::Copy& copy : TheBlock().running->copies) {
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
  TheBlock().running->copies.clear();
}

void SetSeed(uint64_t seed) { TheBlock().seed = seed; }
uint64_t Seed() { return TheBlock().seed; }

bool RunGrid(dim3 grid, uint32_t n_threads, size_t shared_bytes, uint64_t seed,
             const std::function<void()>& body) {
  static std::mutex one_grid;
  std::lock_guard lock(one_grid);
  Block& block = TheBlock();
  if (shared_bytes > kDynamicSharedBytes) return false;
  block.fibers.resize(n_threads);
  block.slots.assign(2 * size_t{n_threads}, Slot{});
  block.body = &body;
  std::mt19937_64 random(seed);
  for (uint32_t y = 0; y < grid.y; ++y) {
    for (uint32_t x = 0; x < grid.x; ++x) {
      block.index = {x, y, 0};
      if (!RunBlock(block, random)) return false;
    }
  }
  return true;
}

}  // namespace prefixd::gpu::emulated
