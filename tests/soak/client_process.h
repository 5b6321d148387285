// The client process's inside: what it holds, and a function for each kind of call. Internal to
// client.cc and client_puts.cc.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/soak/client.h"

namespace prefixd::soak {

class Client {
 public:
  Client(const World& world, const ClientPlan& plan, Tally& tally)
      : world_(world), plan_(plan), tally_(tally), rng_(plan.seed) {}

  void Run();

 private:
  struct Held {
    std::shared_ptr<Session> session;
    size_t prompt = 0, policy = 0;
  };

  bool Chance(double p) { return std::bernoulli_distribution(p)(rng_); }
  size_t Pick(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(rng_); }

  // Counts an outcome; returns whether it was a success.
  bool Done(Op op, const Status& status) {
    tally_.Add(op);
    if (status.ok()) return true;
    if (status.error().code == Code::kResourceExhausted) {
      ++tally_.shed;
      ::usleep(5000);  // as told: try again later
      return false;
    }
    ++tally_.failed;
    tally_.Note(std::string(kOpNames[static_cast<size_t>(op)]) + ": " + status.error().ToString());
    if (status.error().code == Code::kUnavailable) Drop();
    return false;
  }
  template <typename T>
  bool Done(Op op, const Result<T>& result) {
    return Done(op, result.ok() ? Status() : Status(result.error()));
  }
  void Wrong(Op op, const std::string& what) {
    ++tally_.wrong;
    tally_.Note(std::string(kOpNames[static_cast<size_t>(op)]) + " answered wrongly: " + what);
  }
  void Drop() {
    held_.clear();
    store_.reset();
  }

  void Pause();
  void Reconnect();
  void Attach();
  void Detach();
  void Compare(Op op, const Answer& want, const std::vector<float>& y,
               const std::vector<float>& lse);

  struct Question {
    const Held* held;
    uint32_t layer;
    size_t query;
    Answer out;
    StepInfo info;
  };
  Question Ask();
  const std::vector<float>& QueryOf(const Question& q) const {
    const size_t model = world_.prompts[q.held->prompt].model;
    return world_.queries[model][q.layer * World::kQueries + q.query];
  }
  void CompareAnswer(Op op, const Question& q) {
    Compare(op, world_.AnswerOf(q.held->prompt, q.held->policy, q.layer, q.query), q.out.y,
            q.out.lse);
  }

  void Step();
  void Batch(size_t most);

  // Exact attention of several queries at once is what full steps answer.
  void Exact();

  // Reads a run of a layer, which must be the bytes that were put.
  bool SameRows(Session& session, const Prompt& prompt, Op op);
  void Read();
  void InPlace();
  void SetPolicy();
  void Report();
  void Match();
  // What belongs to another tenant is refused.
  void Foreign();
  Prompt OwnPrompt();
  PutSpec SpecOf(const Prompt& prompt);

  // Stores a prompt of its own, reads it back, and removes it.
  void Put();

  // Puts that come to no end: aborted, forgotten, or committed too early.
  void Unfinished();
  void Manage();

  const World& world_;
  const ClientPlan& plan_;
  Tally& tally_;
  std::mt19937_64 rng_;
  std::unique_ptr<Store> store_;
  std::vector<Held> held_;
};

}  // namespace prefixd::soak
