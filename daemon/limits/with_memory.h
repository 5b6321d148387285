// Steps that a client waits for, or that free what it held, must not be lost for want of memory.
//
// Thread-safety: free functions.
#pragma once

#include <boost/asio/post.hpp>
#include <chrono>
#include <new>
#include <thread>

namespace prefixd::daemon {

// Runs `step`, which changes nothing when it throws, until there is the little memory that it
// takes.
template <typename Step>
auto WithMemory(Step&& step) {
  while (true) {
    try {
      return step();
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

// Posts `work`; nothing is allocated when it runs.
template <typename Executor, typename Work>
void PostSurely(Executor& executor, const Work& work) {
  WithMemory([&] { boost::asio::post(executor, work); });
}

}  // namespace prefixd::daemon
