// Tests the file of tokens and users: what it may say, who may own it, and whom it lets in.
#include "daemon/access/token_file.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "daemon/access/access.h"
#include "daemon/access/token.h"
#include "daemon/http/readers.h"
#include "tests/support/expect_ok.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::daemon {
namespace {

constexpr uid_t kStranger = 4'000'001;  // neither this process's user nor root

std::string Entry(const std::string& tenant, const std::string& token,
                  const std::string& more = "") {
  return "[[tokens]]\ntenant = '" + tenant + "'\nhash = '" + HashText(HashToken(token)) + "'\n" +
         more;
}

std::string Refusal(const std::string& text) {
  const auto table = ParseTokens(text, "F");
  return table.ok() ? "" : table.error().message;
}

Result<Credential> Enter(const std::string& file, const wire::Hello& hello,
                         std::optional<uid_t> user = std::nullopt) {
  const auto table = ParseTokens(file, "F");
  EXPECT_OK(table);
  return Access(std::make_shared<const AccessTable>(*table)).Admit(hello, user);
}

TEST(Tokens, AreLongAndNeverTheSame) {
  std::set<std::string> made;
  for (int i = 0; i < 1000; ++i) made.insert(MakeToken());
  EXPECT_EQ(made.size(), 1000u);
  for (const std::string& token : made) {
    EXPECT_EQ(token.size(), 47u) << token;
    EXPECT_EQ(token.find("pfx_"), 0u) << token;
  }
}

TEST(Tokens, HashesReadBack) {
  const TokenHash hash = HashToken("secret");
  EXPECT_TRUE(SameHash(*ParseHash(HashText(hash)), hash));
  EXPECT_FALSE(SameHash(hash, HashToken("Secret")));
  std::string text = HashText(hash);
  for (const std::string& bad :
       {std::string(), std::string("blake2b:"), text.substr(1), text + "0", text.substr(0, 71),
        text.substr(0, 71) + "g", "sha256:" + text.substr(8)}) {
    EXPECT_FALSE(ParseHash(bad).ok()) << bad;
  }
}

TEST(TokenFile, SaysWhatIsWrongAndWhere) {
  EXPECT_EQ(Refusal(""), "");
  EXPECT_EQ(Refusal(Entry("a", "1") + Entry("a", "2") + Entry("b", "3")), "");
  EXPECT_NE(Refusal(Entry("a", "1") + Entry("b", "1")).find("F:4: the same stands here twice"),
            std::string::npos);
  EXPECT_NE(Refusal("[[token]]\n").find("F:1: unknown key 'token'"), std::string::npos);
  EXPECT_NE(Refusal("[tokens]\na = 1\n").find("two brackets"), std::string::npos);
  EXPECT_NE(Refusal("tokens = 3\n").find("two brackets"), std::string::npos);
  EXPECT_NE(Refusal("[[tokens]]\ntenant = 'a'\n").find("F:1: hash is missing"), std::string::npos);
  EXPECT_NE(Refusal("[[tokens]]\nhash = 'blake2b:0'\ntenant = 'a'").find("F:2: a hash is"),
            std::string::npos);
  EXPECT_NE(Refusal(Entry("a", "1", "right = ['read']\n")).find("F:4: unknown key 'right'"),
            std::string::npos);
  EXPECT_NE(Refusal(Entry("a", "1", "rights = ['all']\n")).find("'all' is no right"),
            std::string::npos);
  EXPECT_NE(Refusal(Entry("a", "1", "rights = 'read'\n")).find("must be a list"),
            std::string::npos);
  EXPECT_NE(Refusal(Entry("a", "1", "name = 7\n")).find("name must be a text"), std::string::npos);
  EXPECT_NE(Refusal(Entry(std::string(257, 'a'), "1")).find("longer than 256"), std::string::npos);
  EXPECT_NE(Refusal("[[users]]\ntenant = 'a'\n").find("user is missing"), std::string::npos);
  EXPECT_NE(Refusal("[[users]]\ntenant = 'a'\nuser = -1\n").find("is no user's number"),
            std::string::npos);
  EXPECT_NE(Refusal("[[users]]\ntenant = 'a'\nuser = 'no such user'\n").find("there is no user"),
            std::string::npos);
  EXPECT_EQ(Refusal("[[users]]\ntenant = 'a'\nuser = 'root'\n"), "");
  EXPECT_NE(Refusal("[[tokens]\n").find("F:1: "), std::string::npos);
}

TEST(TokenFile, FindsUsersByName) {
  const FindUser find = [](const std::string& name) {
    return name == "engine" ? std::optional<uid_t>(kStranger) : std::nullopt;
  };
  const auto parse = [&](const std::string& user) {
    return ParseTokens("[[users]]\ntenant = 'a'\nuser = '" + user + "'\n", "F", find);
  };
  const auto table = parse("engine");
  ASSERT_OK(table);
  ASSERT_EQ(table->users.size(), 1u);
  EXPECT_EQ(table->users[0].user, kStranger);
  EXPECT_CODE(parse("root"), Code::kInvalidArgument);
  EXPECT_EQ(FindSystemUser("root"), 0u);
  EXPECT_EQ(FindSystemUser("no such user"), std::nullopt);
}

// No right that a file does not name, and no admin by default.
TEST(TokenFile, RightsAreThoseItNames) {
  const auto rights = [](const std::string& more) {
    return RightsText(ParseTokens(Entry("a", "1", more), "F")->tokens[0].grant);
  };
  EXPECT_EQ(rights(""), "read,write");
  EXPECT_EQ(rights("rights = ['read']\n"), "read");
  EXPECT_EQ(rights("rights = ['admin', 'write']\n"), "write,admin");
  EXPECT_NE(Refusal(Entry("a", "1", "rights = []\n")), "");
}

TEST(TokenFile, IsItsOwnersAlone) {
  testing::TempDir dir;
  const std::string file = dir.path() / "tokens.toml";
  EXPECT_EQ(ReadTokens(file).error().code, Code::kIo);
  const TokenGrant first{HashToken("1"), "old", {.tenant = "team 'a'"}};
  const TokenGrant second{HashToken("2"), "", {.tenant = "b", .write = false, .admin = true}};
  ASSERT_OK(AppendToken(file, first));
  ASSERT_OK(AppendToken(file, second));
  EXPECT_FALSE(AppendToken(file, second).ok());  // and nothing is written
  const auto table = ReadTokens(file);
  ASSERT_OK(table);
  ASSERT_EQ(table->tokens.size(), 2u);
  EXPECT_EQ(table->tokens[0].grant, first.grant);
  EXPECT_EQ(table->tokens[0].name, "old");
  EXPECT_EQ(table->tokens[1].grant, second.grant);
  for (const mode_t mode : {0640u, 0604u, 0620u, 0602u, 0611u}) {
    ASSERT_EQ(::chmod(file.c_str(), mode), 0);
    const auto refused = ReadTokens(file);
    ASSERT_FALSE(refused.ok()) << mode;
    EXPECT_NE(refused.error().message.find("chmod 600 " + file), std::string::npos);
    EXPECT_FALSE(AppendToken(file, {HashToken("3"), "", {.tenant = "c"}}).ok());
  }
  EXPECT_NE(ReadTokens(dir.path()).error().message.find("is no file"), std::string::npos);
}

// Root makes the file and gives it to the daemon's user, and goes on looking after it.
TEST(TokenFile, RootLooksAfterThatOfAnyUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  testing::TempDir dir;
  const std::string file = dir.path() / "tokens.toml";
  ASSERT_OK(AppendToken(file, {HashToken("1"), "", {.tenant = "a"}}));
  ASSERT_EQ(::chown(file.c_str(), 12345, 12345), 0);
  EXPECT_OK(AppendToken(file, {HashToken("2"), "", {.tenant = "b"}}));
  const auto table = ReadTokens(file, Who::kOperator);
  ASSERT_OK(table);
  EXPECT_EQ(table->tokens.size(), 2u);
  // A daemon that runs as root would believe user 12345.
  EXPECT_CODE(ReadTokens(file), Code::kFailedPrecondition);
  ASSERT_EQ(::chmod(file.c_str(), 0640), 0);
  EXPECT_CODE(ReadTokens(file, Who::kOperator), Code::kFailedPrecondition);
}

// An operator has made it as root, and the daemon is another user.
TEST(TokenFile, WhoMayNotReadItIsToldWhoseItShouldBe) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root becomes another user";
  testing::TempDir dir;
  const std::string tokens = dir.path() / "tokens.toml", http = dir.path() / "http.token";
  ASSERT_OK(AppendToken(tokens, {HashToken("1"), "", {.tenant = "a"}}));
  std::ofstream(http) << "0123456789abcdef0123456789\n";
  ASSERT_EQ(::chmod(http.c_str(), 0600), 0);
  ASSERT_EQ(::chmod(dir.path().c_str(), 0755), 0);
  ASSERT_EQ(::seteuid(12345), 0);
  const auto table = ReadTokens(tokens);
  const auto token = ReadHttpToken(http);
  ASSERT_EQ(::seteuid(0), 0);
  for (const std::string& said : {table.error().message, token.error().message}) {
    EXPECT_NE(said.find("12345"), std::string::npos) << said;
    EXPECT_NE(said.find("its owner (chown)"), std::string::npos) << said;
  }
  ASSERT_EQ(::chown(http.c_str(), 12345, 12345), 0);
  ASSERT_EQ(::seteuid(12345), 0);
  const auto own = ReadHttpToken(http);
  ASSERT_EQ(::seteuid(0), 0);
  EXPECT_OK(own);
}

// A disk that takes only a part of a token, as where it is full or a limit is reached.
TEST(TokenFile, ATokenIsWrittenWholeOrNotAtAll) {
  testing::TempDir dir;
  const std::string file = dir.path() / "tokens.toml";
  ASSERT_OK(AppendToken(file, {HashToken("1"), "", {.tenant = "a"}}));
  const std::string before = testing::ReadFile(file);
  rlimit was{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &was), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit less{before.size() + 20, was.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &less), 0);
  const Status appended = AppendToken(file, {HashToken("2"), "", {.tenant = "b"}});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &was), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_CODE(appended, Code::kIo);
  EXPECT_EQ(testing::ReadFile(file), before);
  EXPECT_OK(ReadTokens(file));
}

TEST(AccessTest, ATokenSpeaksForItsTenantAlone) {
  const std::string file = Entry("a", "1") + Entry("a", "2", "rights = ['read']\n") +
                           Entry("b", "3", "rights = ['read', 'write', 'admin']\n");
  EXPECT_EQ(Enter(file, {.token = "1"})->grant.tenant, "a");
  EXPECT_EQ(Enter(file, {.tenant = "a", .token = "1"})->grant.tenant, "a");
  EXPECT_FALSE(Enter(file, {.tenant = "a", .token = "2"})->grant.write);
  for (const wire::Hello& stranger :
       {wire::Hello{}, wire::Hello{.token = "4"}, wire::Hello{.tenant = "a"},
        wire::Hello{.tenant = "b", .token = "1"}, wire::Hello{.token = "1", .admin = true},
        wire::Hello{.token = std::string(2000, '1')},
        wire::Hello{.token = HashText(HashToken("1"))}}) {  // a stolen file lets nobody in
    EXPECT_FALSE(Enter(file, stranger).ok()) << stranger.tenant << " " << stranger.token;
  }
  // An admin's connection sees all tenants only if it asks for that.
  EXPECT_FALSE(Enter(file, {.token = "3"})->grant.admin);
  EXPECT_TRUE(Enter(file, {.token = "3", .admin = true})->grant.admin);
  EXPECT_EQ(Enter(file, {.tenant = "a", .token = "3"})->grant.tenant, "a");
}

TEST(AccessTest, LocalUsersHaveTheirTenants) {
  const std::string number = std::to_string(kStranger);
  const std::string file = "[[users]]\nuser = " + number +
                           "\ntenant = 'a'\n[[users]]\nuser = " + number +
                           "\ntenant = 'b'\nrights = ['read']\n" + Entry("c", "1");
  EXPECT_EQ(Enter(file, {}, kStranger)->grant.tenant, "a");
  EXPECT_FALSE(Enter(file, {.tenant = "b"}, kStranger)->grant.write);
  EXPECT_EQ(Enter(file, {.token = "1"}, kStranger)->grant.tenant, "c");
  EXPECT_FALSE(Enter(file, {.tenant = "c"}, kStranger).ok());
  EXPECT_FALSE(Enter(file, {.admin = true}, kStranger).ok());
  EXPECT_FALSE(Enter(file, {}, kStranger + 1).ok());
  // The daemon's own user needs no entry.
  EXPECT_TRUE(Enter(file, {.tenant = "z", .admin = true}, ::geteuid())->own);
  EXPECT_TRUE(Enter(file, {.tenant = "z"}, 0)->own);
}

// Services that run as root present tokens over the Unix socket, too.
TEST(AccessTest, ATokenOfTheDaemonsOwnUserIsOneAsAnyOther) {
  const std::string file = Entry("a", "1", "rights = ['read']\n") +
                           Entry("b", "2", "rights = ['read', 'write', 'admin']\n");
  for (const uid_t user : {::geteuid(), uid_t{0}}) {
    const auto reader = Enter(file, {.token = "1"}, user);
    ASSERT_OK(reader);
    EXPECT_EQ(reader->grant, (Grant{.tenant = "a", .write = false}));
    EXPECT_TRUE(reader->own);
    EXPECT_FALSE(Enter(file, {.token = "3"}, user).ok());
    EXPECT_FALSE(Enter(file, {.tenant = "b", .token = "1"}, user).ok());
    EXPECT_FALSE(Enter(file, {.token = "1", .admin = true}, user).ok());
    EXPECT_TRUE(Enter(file, {.token = "2", .admin = true}, user)->grant.admin);
    EXPECT_TRUE(Enter(file, {.tenant = "z", .admin = true}, user)->grant.admin);  // without one
    Access access(std::make_shared<const AccessTable>(*ParseTokens(file, "F")));
    const auto admitted = access.Admit({.token = "1"}, user);
    ASSERT_OK(admitted);
    EXPECT_TRUE(access.Holds(*admitted));
    access.Replace(std::make_shared<const AccessTable>(*ParseTokens(Entry("b", "2"), "F")));
    EXPECT_FALSE(access.Holds(*admitted));
  }
  // Without a file nobody looks at it.
  EXPECT_EQ(Access().Admit({.tenant = "z", .token = "1"}, ::geteuid())->grant.tenant, "z");
}

TEST(AccessTest, WithoutAFileClientsNameTheirTenant) {
  const Access access;
  EXPECT_EQ(access.Admit({.tenant = "a"}, kStranger)->grant.tenant, "a");
  EXPECT_EQ(access.Admit({.tenant = "a"}, std::nullopt)->grant.tenant, "a");
  EXPECT_FALSE(access.Admit({.admin = true}, kStranger).ok());
  EXPECT_FALSE(access.Admit({.admin = true}, std::nullopt).ok());
}

TEST(AccessTest, WhatIsTakenBackHoldsNoLonger) {
  const auto table = [](const std::string& text) {
    return std::make_shared<const AccessTable>(*ParseTokens(text, "F"));
  };
  const std::string user = "[[users]]\nuser = " + std::to_string(kStranger) + "\ntenant = 'u'\n";
  const std::string file = Entry("a", "1") + Entry("a", "2") + user;
  Access access(table(file));
  const auto one = access.Admit({.token = "1"}, std::nullopt);
  const auto two = access.Admit({.token = "2"}, std::nullopt);
  const auto local = access.Admit({}, kStranger);
  const auto own = access.Admit({}, ::geteuid());
  ASSERT_TRUE(one.ok() && two.ok() && local.ok() && own.ok());
  const auto holds = [&](const std::string& text) {
    access.Replace(table(text));
    return std::vector<bool>{access.Holds(*one), access.Holds(*two), access.Holds(*local),
                             access.Holds(*own)};
  };
  using Four = std::vector<bool>;
  EXPECT_EQ(holds(file), (Four{true, true, true, true}));
  EXPECT_EQ(holds(Entry("a", "2") + Entry("a", "3")), (Four{false, true, false, true}));
  EXPECT_EQ(holds(Entry("b", "1") + user), (Four{false, false, true, true}));  // another's now
  EXPECT_EQ(holds(Entry("a", "1", "rights = ['read']\n")), (Four{false, false, false, true}));
  EXPECT_EQ(holds(""), (Four{false, false, false, true}));
}

// A tenant's name may have no letters.
TEST(AccessTest, ATokenOfTheNamelessTenantIsTakenBackLikeOthers) {
  const auto table = [](const std::string& tenant) {
    return std::make_shared<const AccessTable>(*ParseTokens(Entry(tenant, "1"), "F"));
  };
  Access access(table(""));
  const auto nameless = access.Admit({.token = "1"}, std::nullopt);
  ASSERT_OK(nameless);
  EXPECT_TRUE(access.Holds(*nameless));
  access.Replace(table("b"));
  EXPECT_FALSE(access.Holds(*nameless));
}

}  // namespace
}  // namespace prefixd::daemon
