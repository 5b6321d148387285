#include "tests/soak/client.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include "tests/soak/client_process.h"

namespace prefixd::soak {
namespace {

// What the client suite allows between an embedded store and a daemon: summaries are merged along
// chains that depend on the order of puts and on compaction.
constexpr double kTolerance = 1e-4;

}  // namespace

void Client::Run() {
  while (!tally_.stop) {
    if (!store_ || Chance(0.0005)) Reconnect();
    if (!store_) {
      ::usleep(20000);
      continue;
    }
    if (held_.size() < plan_.sessions) {
      Attach();
      continue;
    }
    Pause();
    const double what = std::uniform_real_distribution(0.0, 1.0)(rng_);
    if (plan_.flood && what < 0.9) {
      what < 0.2 ? Step() : what < 0.7 ? Batch(32) : Exact();
      continue;
    }
    if (what < 0.60) {
      Step();
    } else if (what < 0.78) {
      Batch(8);
    } else if (what < 0.80) {
      Exact();
    } else if (what < 0.85) {
      Read();
    } else if (what < 0.88) {
      InPlace();
    } else if (what < 0.91) {
      SetPolicy();
    } else if (what < 0.92) {
      Report();
    } else if (what < 0.95) {
      Detach();
    } else if (what < 0.965) {
      Match();
    } else if (what < 0.97) {
      Foreign();
    } else if (what < 0.985) {
      Put();
    } else if (what < 0.99) {
      Unfinished();
    } else {
      Manage();
    }
  }
  while (!held_.empty()) Detach();
}

void Client::Pause() {
  if (plan_.pause_ms <= 0) return;
  const double ms = std::exponential_distribution<double>(1 / plan_.pause_ms)(rng_);
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(std::min(ms, 1000.0)));
}

void Client::Reconnect() {
  Drop();
  auto connected = Connect(plan_.address, plan_.connect);
  if (Done(Op::kConnect, connected)) store_ = *std::move(connected);
}

void Client::Attach() {
  const size_t p = Pick(world_.prompts.size()), policy = Pick(world_.policies.size());
  const Prompt& prompt = world_.prompts[p];
  AttachSpec spec;
  spec.model = world_.ModelOf(prompt).name;
  spec.tokens = prompt.tokens;
  if (Chance(0.5)) spec.tokens.insert(spec.tokens.end(), {50001, 50002});  // a new question
  spec.policy = world_.policies[policy];
  auto session = store_->Attach(spec);
  if (!Done(Op::kAttach, session)) return;
  if ((*session)->info().n_tokens != prompt.tokens.size()) {
    Wrong(Op::kAttach, std::to_string((*session)->info().n_tokens) + " tokens");
  }
  held_.push_back({*std::move(session), p, policy});
}

void Client::Detach() {
  if (held_.empty()) return;
  const size_t at = Pick(held_.size());
  const Held held = std::exchange(held_[at], held_.back());
  held_.pop_back();
  if (Chance(0.3)) return;  // the destructor detaches
  Done(Op::kDetach, held.session->Detach());
}

void Client::Compare(Op op, const Answer& want, const std::vector<float>& y,
                     const std::vector<float>& lse) {
  ++tally_.compared;
  if (y == want.y && lse == want.lse) {
    ++tally_.equal;
    return;
  }
  double worst = 0;
  const auto differ = [&](const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
      const double by = std::abs(double{a[i]} - double{b[i]});
      worst = std::isnan(by) ? 1 : std::max(worst, by);
    }
  };
  differ(y, want.y);
  differ(lse, want.lse);
  const auto e9 = static_cast<uint64_t>(worst * 1e9);
  uint64_t largest = tally_.largest_difference_e9;
  while (e9 > largest && !tally_.largest_difference_e9.compare_exchange_weak(largest, e9)) {
  }
  if (worst > kTolerance) Wrong(op, "off by " + std::to_string(worst));
}

Client::Question Client::Ask() {
  const Held& held = held_[Pick(held_.size())];
  const KvGeometry& g = world_.ModelOf(world_.prompts[held.prompt]).geometry;
  Question question{&held, static_cast<uint32_t>(Pick(g.n_layers)), Pick(World::kQueries), {}, {}};
  question.out.y.resize(size_t{g.n_q_heads} * g.value_dim);
  question.out.lse.resize(g.n_q_heads);
  return question;
}

void Client::Step() {
  Question q = Ask();
  const auto begun = std::chrono::steady_clock::now();
  const Status status = q.held->session->Step(q.layer, QueryOf(q), q.out.y, q.out.lse,
                                              Chance(0.2) ? &q.info : nullptr);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begun;
  if (!Done(Op::kStep, status)) return;
  tally_.steps.Add(plan_.tenant, took.count());
  CompareAnswer(Op::kStep, q);
}

void Client::Batch(size_t most) {
  std::vector<Question> questions(1 + Pick(most));
  for (Question& q : questions) q = Ask();
  std::vector<StepRequest> requests;
  for (Question& q : questions) {
    requests.push_back(
        {q.held->session.get(), q.layer, QueryOf(q), q.out.y, q.out.lse, nullptr, {}});
  }
  store_->StepBatch(requests);
  for (size_t i = 0; i < questions.size(); ++i) {
    if (!requests[i].status.ok()) {
      Done(Op::kBatch, requests[i].status);
      if (!store_) return;
      continue;
    }
    CompareAnswer(Op::kBatch, questions[i]);
  }
  tally_.Add(Op::kBatch);
}

void Client::Exact() {
  const Question q = Ask();
  const Prompt& prompt = world_.prompts[q.held->prompt];
  const KvGeometry& g = world_.ModelOf(prompt).geometry;
  std::vector<float> queries, y(World::kQueries * q.out.y.size());
  std::vector<float> lse(World::kQueries * q.out.lse.size());
  for (size_t i = 0; i < World::kQueries; ++i) {
    const auto& one = world_.queries[prompt.model][q.layer * World::kQueries + i];
    queries.insert(queries.end(), one.begin(), one.end());
  }
  if (!Done(Op::kExact, q.held->session->AttendExact(q.layer, World::kQueries, queries, y, lse))) {
    return;
  }
  const size_t values = size_t{g.n_q_heads} * g.value_dim;
  for (size_t i = 0; i < World::kQueries; ++i) {
    const std::vector<float> one_y(y.begin() + i * values, y.begin() + (i + 1) * values);
    const std::vector<float> one_lse(lse.begin() + i * g.n_q_heads,
                                     lse.begin() + (i + 1) * g.n_q_heads);
    Compare(Op::kExact, world_.AnswerOf(q.held->prompt, /*full*/ 0, q.layer, i), one_y, one_lse);
  }
}

bool Client::SameRows(Session& session, const Prompt& prompt, Op op) {
  const KvGeometry& g = world_.ModelOf(prompt).geometry;
  const auto n = static_cast<uint32_t>(prompt.tokens.size());
  const auto begin = static_cast<uint32_t>(Pick(n));
  const uint32_t size = 1 + static_cast<uint32_t>(Pick(std::min<size_t>(n - begin, 300)));
  const auto layer = static_cast<uint32_t>(Pick(g.n_layers));
  const size_t token = prompt.k[layer].size() / n;
  std::vector<std::byte> k(size * token), v(k);
  if (!Done(op, session.ReadLayer({layer, {begin, begin + size}}, k, v))) return false;
  if (std::equal(k.begin(), k.end(), prompt.k[layer].begin() + begin * token) &&
      std::equal(v.begin(), v.end(), prompt.v[layer].begin() + begin * token)) {
    return true;
  }
  Wrong(op, "rows of tokens " + std::to_string(begin) + " and behind");
  return false;
}

void Client::Read() {
  const Held& held = held_[Pick(held_.size())];
  const Prompt& prompt = world_.prompts[held.prompt];
  const auto session = held.session;  // stays when a failure drops all
  if (!SameRows(*session, prompt, Op::kRead)) return;
  const auto begin = static_cast<uint32_t>(Pick(prompt.tokens.size()));
  std::vector<uint32_t> tokens(prompt.tokens.size() - begin);
  if (Done(Op::kRead,
           session->ReadTokens({begin, static_cast<uint32_t>(prompt.tokens.size())}, tokens)) &&
      !std::equal(tokens.begin(), tokens.end(), prompt.tokens.begin() + begin)) {
    Wrong(Op::kRead, "token ids");
  }
}

void Client::InPlace() {
  const Held& held = held_[Pick(held_.size())];
  const Prompt& prompt = world_.prompts[held.prompt];
  const KvGeometry& g = world_.ModelOf(prompt).geometry;
  const auto layer = static_cast<uint32_t>(Pick(g.n_layers));
  const auto head = static_cast<uint32_t>(Pick(g.n_kv_heads));
  std::vector<uint32_t> ids;
  for (uint32_t id = static_cast<uint32_t>(Pick(50)); id < prompt.tokens.size();
       id += 1 + static_cast<uint32_t>(Pick(60))) {
    ids.push_back(id);
  }
  const auto rows = held.session->ReadInPlace(layer, head, ids);
  if (!rows.ok() && rows.error().code == Code::kFailedPrecondition) return;  // over TCP
  if (!Done(Op::kInPlace, rows)) return;
  const size_t key = g.row(0).key_bytes();
  for (size_t i = 0; i < ids.size(); ++i) {
    const size_t at = (size_t{ids[i]} * g.n_kv_heads + head) * key;
    if (std::memcmp(rows->rows[i].key, &prompt.k[layer][at], key) != 0 ||
        std::memcmp(rows->rows[i].value, &prompt.v[layer][at], key) != 0) {
      return Wrong(Op::kInPlace, "row " + std::to_string(ids[i]));
    }
  }
}

void Client::SetPolicy() {
  Held& held = held_[Pick(held_.size())];
  const size_t policy = Pick(world_.policies.size());
  const auto session = held.session;
  if (Done(Op::kPolicy, session->SetPolicy(world_.policies[policy]))) held.policy = policy;
}

void Client::Report() {
  const Held& held = held_[Pick(held_.size())];
  const auto report = held.session->report();
  if (!Done(Op::kReport, report)) return;
  if (report->info.n_tokens != held.session->info().n_tokens) {
    Wrong(Op::kReport, "another session's");
  }
}

void Client::Match() {
  const Prompt& prompt = world_.prompts[Pick(world_.prompts.size())];
  const auto match = store_->Match({.model = world_.ModelOf(prompt).name,
                                    .tenant = plan_.connect.tenant,
                                    .tokens = prompt.tokens});
  if (Done(Op::kMatch, match) && match->n_tokens != prompt.tokens.size()) {
    Wrong(Op::kMatch, std::to_string(match->n_tokens) + " tokens");
  }
}

void Client::Foreign() {
  if (plan_.other.empty()) return;
  const Prompt& prompt = world_.prompts[Pick(world_.prompts.size())];
  const auto match = store_->Match(
      {.model = world_.ModelOf(prompt).name, .tenant = plan_.other, .tokens = prompt.tokens});
  if (match.ok()) return Wrong(Op::kForeign, "a match for " + plan_.other);
  if (match.error().code == Code::kInvalidArgument) return tally_.Add(Op::kForeign);
  Done(Op::kForeign, match);
}

void RunClient(const World& world, const ClientPlan& plan, Tally& tally) {
  Client(world, plan, tally).Run();
}

}  // namespace prefixd::soak
