// Fuzzes the file of tokens: what is read is written back and read again alike.
#include "daemon/access/token_file.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

// Users of no machine: what a run finds must not hang on where it runs.
std::optional<uid_t> FindUser(const std::string& name) {
  return name.size() % 2 == 1 ? std::optional<uid_t>(name.size()) : std::nullopt;
}

bool Alike(const daemon::Grant& a, const daemon::Grant& b) {
  return a.tenant == b.tenant && a.read == b.read && a.write == b.write && a.admin == b.admin;
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  const std::string text = in.ConsumeRemainingBytesAsString();
  const auto table = daemon::ParseTokens(text, "f", FindUser);
  if (!table.ok()) {
    FUZZ_EXPECT(table.error().code == Code::kInvalidArgument && !table.error().message.empty());
    return;
  }
  std::string written;
  for (const daemon::TokenGrant& token : table->tokens) {
    FUZZ_EXPECT(table->Find(token.hash) != nullptr);
    FUZZ_EXPECT(token.grant.tenant.size() <= daemon::kMaxTenantBytes);
    FUZZ_EXPECT(token.grant.read || token.grant.write || token.grant.admin);
    written += daemon::TokenLines(token);
  }
  const auto again = daemon::ParseTokens(written, "f", FindUser);
  FUZZ_EXPECT(again.ok() && again->tokens.size() == table->tokens.size());
  for (size_t i = 0; i < table->tokens.size(); ++i) {
    FUZZ_EXPECT(Alike(again->tokens[i].grant, table->tokens[i].grant));
    FUZZ_EXPECT(again->tokens[i].hash == table->tokens[i].hash);
    FUZZ_EXPECT(again->tokens[i].name == table->tokens[i].name);
  }
}

}  // namespace prefixd::fuzz
