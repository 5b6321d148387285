// Puts of a client of the soak, and its calls on the store as a whole.
#include <span>
#include <utility>

#include "base/every_page.h"
#include "tests/soak/client_process.h"

namespace prefixd::soak {

Prompt Client::OwnPrompt() {
  const Prompt& like = world_.prompts[Pick(world_.prompts.size())];
  const auto common = static_cast<uint32_t>(Pick(like.tokens.size()));
  const uint32_t n = common + 1 + static_cast<uint32_t>(Pick(200));
  return MakePrompt(world_.ModelOf(like), like.model, n, rng_(), &like, common);
}

PutSpec Client::SpecOf(const Prompt& prompt) {
  PutSpec spec{world_.ModelOf(prompt).name, "", prompt.tokens, "own"};
  spec.ttl_seconds = 60;  // of clients that are killed before they remove it
  spec.wait_ms = 50;
  return spec;
}

void Client::Put() {
  const Prompt prompt = OwnPrompt();
  auto put = store_->BeginPut(SpecOf(prompt));
  if (!Done(Op::kPut, put)) return;
  const Status written =
      WriteRows(**put, world_.ModelOf(prompt), prompt, 1 + static_cast<uint32_t>(Pick(300)));
  if (!written.ok()) {
    Done(Op::kPut, written);
    return;
  }
  const auto stored = (*put)->Commit();
  if (!Done(Op::kPut, stored)) return;
  AttachSpec spec;
  spec.prefix = stored->prefix;
  spec.n_tokens = stored->n_tokens;
  spec.policy.mode = StepMode::kFull;
  auto session = store_->Attach(spec);
  if (!Done(Op::kAttach, session)) return;
  SameRows(**session, prompt, Op::kRead);
  if (!store_) return;
  if (Chance(0.3)) {
    // Where much waits to be made ready, its lifetime may end before.
    const Status ready = store_->WaitReady(stored->prefix, {});
    const bool expired = !ready.ok() && ready.error().code == Code::kNotFound;
    Done(Op::kReady, expired ? Status() : ready);
  }
  if (!store_ || !Done(Op::kDetach, (*session)->Detach())) return;
  if (Chance(0.5)) {
    Done(Op::kLifetime, store_->SetLifetime(stored->prefix, {{}, 5}));
  } else {
    Done(Op::kRemove, store_->Remove(stored->prefix));
  }
}

void Client::Unfinished() {
  const Prompt prompt = OwnPrompt();
  const ModelSpec& spec = world_.ModelOf(prompt);
  auto put = store_->BeginPut(SpecOf(prompt));
  if (!Done(Op::kPut, put)) return;
  const size_t token = prompt.k[0].size() / prompt.tokens.size();
  const auto n = static_cast<uint32_t>(prompt.tokens.size());
  Status first = (*put)->Write(0, 0, n, prompt.k[0], prompt.v[0]);
  if (!first.ok()) {
    Done(Op::kPut, first);
    return;
  }
  if (Chance(0.5)) {
    const auto early = (*put)->Commit();
    if (early.ok() || early.error().code != Code::kFailedPrecondition) {
      Wrong(Op::kEarlyCommit, early.ok() ? "stored" : early.error().ToString());
    }
    tally_.Add(Op::kEarlyCommit);
    const uint32_t last = n - 1;
    if (spec.geometry.n_layers > 1) {
      first = (*put)->Write(1, last, 1, std::span(prompt.k[1]).subspan(last * token, token),
                            std::span(prompt.v[1]).subspan(last * token, token));
      if (!first.ok()) Done(Op::kPut, first);
    }
  }
  if (Chance(0.5)) (*put)->Abort();
  tally_.Add(Op::kAbort);
}

void Client::Manage() {
  if (Chance(0.5)) {
    Done(Op::kList, EveryPrefix(*store_));
  } else if (Chance(0.5)) {
    Done(Op::kList, store_->Stats());
  } else if (Chance(0.5)) {
    Done(Op::kList, EveryModel(*store_));
  } else {
    const Prompt& prompt = world_.prompts[Pick(world_.prompts.size())];
    const auto match = store_->Match({.model = world_.ModelOf(prompt).name,
                                      .tenant = plan_.connect.tenant,
                                      .tokens = prompt.tokens});
    if (!Done(Op::kMatch, match)) return;
    const auto verified = store_->Verify(match->prefix, {});
    if (!verified.ok() && verified.error().code == Code::kNotFound) return;  // another's name
    if (Done(Op::kVerify, verified) && !verified->damaged.empty()) {
      Wrong(Op::kVerify, verified->damaged.front());
    }
  }
}

}  // namespace prefixd::soak
