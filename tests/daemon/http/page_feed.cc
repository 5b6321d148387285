// Gives a daemon something to show: page_feed ADDRESS stores prompts of some tenants, attaches and
// steps, fails a call now and then, until it is killed. Prints a line when all is under way.
// page_feed ADDRESS PROMPTS SESSIONS: a crowd of so many, small ones, of tenants with odd names.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "client_lib/remote_store.h"
#include "tests/daemon/put_prompt.h"

namespace prefixd::testing {
namespace {

// What a page that trusts its clients would run, or be broken by.
constexpr const char* kEvil = "<img src=x onerror=\"window.evil=1\"><script>window.evil=1</script>";

struct Client {
  std::unique_ptr<RemoteStore> store;
  std::vector<std::shared_ptr<Session>> sessions;
};

template <typename T>
T Must(Result<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "page_feed: %s\n", result.error().ToString().c_str());
  std::exit(1);
}

Client Begin(const std::string& address, const std::string& tenant, const std::string& label,
             uint32_t n_tokens, int attaches) {
  ConnectOptions options;
  options.tenant = tenant;
  Client client;
  client.store = Must(RemoteStore::Connect(address, options));
  Prompt prompt = MakePrompt(n_tokens, n_tokens);
  prompt.model.name = "llama-3.2-1b";
  const std::string prefix = Must(PutPrompt(*client.store, prompt, label)).prefix;
  (void)client.store->WaitReady(prefix, {});
  for (int i = 0; i < attaches; ++i) {
    AttachSpec spec;
    spec.model = prompt.model.name;
    spec.tokens = prompt.tokens;
    if (n_tokens < 2000) spec.policy.k = 16;  // a budget would not pay for the anchors
    auto session = Must(client.store->Attach(spec));
    if (i < 2) client.sessions.push_back(std::move(session));
  }
  return client;
}

void Work(Client& client, uint32_t round) {
  std::vector<float> q(4 * 16), y(4 * 16), lse(4);
  for (size_t i = 0; i < q.size(); ++i) q[i] = float(std::sin(double(round * 31 + i)));
  for (const auto& session : client.sessions) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      (void)session->Step(layer, {}, q, y, lse, nullptr);
    }
  }
  if (round % 200 == 7) {
    AttachSpec spec;
    spec.model = "no-such-model";
    spec.tokens = {1, 2, 3};
    (void)client.store->Attach(spec);
  }
}

// Names that are long, of other scripts, written from right to left, or made to break a page.
std::string OddTenant(size_t i) {
  const std::string names[] = {kEvil, std::string(250, 'w'), "法務部 🦉", "\u202eteam",
                               "a\"b\\c\nd"};
  const std::string name = names[i % std::size(names)].substr(0, 250);
  return i < std::size(names) ? name : name.substr(0, 3) + std::to_string(i);
}

[[noreturn]] void Crowd(const std::string& address, size_t prompts, size_t sessions) {
  constexpr size_t kTenants = 40;
  std::vector<Client> clients;
  for (size_t i = 0; i < std::max(prompts, sessions); ++i) {
    if (i < kTenants) clients.push_back(Begin(address, OddTenant(i), "", 64 + uint32_t(i), 0));
    Client& client = clients[i % kTenants];
    if (i >= kTenants && i < prompts) {
      (void)Must(PutPrompt(*client.store, MakePrompt(48, i), "prompt " + std::to_string(i)));
    }
    if (i < sessions) {
      const Prompt own = MakePrompt(64 + uint32_t(i % kTenants), 64 + i % kTenants);
      AttachSpec spec;
      spec.model = "llama-3.2-1b";
      spec.tokens = own.tokens;
      spec.policy.k = 8;
      client.sessions.push_back(Must(client.store->Attach(spec)));
    }
  }
  std::puts("feeding");
  std::fflush(stdout);
  for (uint32_t round = 0;; ++round) {
    for (Client& client : clients) Work(client, round);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// last: the label of one prefix.
int Main(const std::string& address, const std::string& last) {
  std::vector<Client> clients;
  clients.push_back(Begin(address, "legal", "supply contract 2026", 12000, 14));
  clients.push_back(Begin(address, "support", "handbook, third edition", 8000, 9));
  clients.push_back(Begin(address, "research", "proceedings, volume 12", 4000, 3));
  clients.push_back(Begin(address, "legal", "annex", 1500, 2));
  clients.push_back(Begin(address, "research", last, 600, 1));
  std::puts("feeding");
  std::fflush(stdout);
  for (uint32_t round = 0;; ++round) {
    for (Client& client : clients) Work(client, round);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace
}  // namespace prefixd::testing

int main(int argc, char** argv) {
  if (argc == 4) {
    prefixd::testing::Crowd(argv[1], std::strtoul(argv[2], nullptr, 10),
                            std::strtoul(argv[3], nullptr, 10));
  }
  if (argc != 2 && argc != 3) return 2;
  return prefixd::testing::Main(argv[1], argc == 3 ? argv[2] : prefixd::testing::kEvil);
}
