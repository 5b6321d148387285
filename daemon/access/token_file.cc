#include "daemon/access/token_file.h"

#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

namespace prefixd::daemon {
namespace {

constexpr size_t kMaxFileBytes = 16u << 20;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

Error Wrong(const std::string& file, const toml::node& node, const std::string& what) {
  return InvalidArgument(file + ":" + std::to_string(node.source().begin.line) + ": " + what);
}

Status CheckOwner(const std::filesystem::path& file, int fd, Who who) {
  struct stat st {};
  if (::fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    return Error{Code::kFailedPrecondition, file.string() + " is no file"};
  }
  if ((st.st_mode & 077) != 0) {
    std::array<char, 8> mode{};
    std::snprintf(mode.data(), mode.size(), "%04o", static_cast<unsigned>(st.st_mode & 07777));
    return Error{Code::kFailedPrecondition,
                 file.string() +
                     " says who may read which prompts, and others than its owner may "
                     "read or change it (mode " +
                     mode.data() + "): chmod 600 " + file.string()};
  }
  // Root looks after the daemon's file, whoever it runs as.
  if (st.st_uid != ::geteuid() && st.st_uid != 0 && !(who == Who::kOperator && ::geteuid() == 0)) {
    return Error{Code::kFailedPrecondition,
                 file.string() + " belongs to user " + std::to_string(st.st_uid) +
                     ", who could let anyone in: it must belong to this user (" +
                     std::to_string(::geteuid()) + ") or to root"};
  }
  return {};
}

Result<std::string> ReadRest(const std::filesystem::path& file, int fd) {
  std::string text;
  std::array<char, 65536> part;
  while (true) {
    const ssize_t n = ::read(fd, part.data(), part.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return Error{Code::kIo, "cannot read " + file.string() + ": " + std::strerror(errno)};
    if (n == 0) return text;
    if (text.size() + static_cast<size_t>(n) > kMaxFileBytes) {
      return InvalidArgument(file.string() + " has more than 16 MiB");
    }
    text.append(part.data(), static_cast<size_t>(n));
  }
}

// Takes single values out of the table of one token or user.
class Entry {
 public:
  Entry(const std::string& file, const toml::table& table) : file_(file), table_(table) {}

  Status Known(std::initializer_list<std::string_view> keys) const {
    for (const auto& [key, node] : table_) {
      if (std::ranges::find(keys, key.str()) == keys.end()) {
        std::string all;
        for (const std::string_view k : keys) all += (all.empty() ? "" : ", ") + std::string(k);
        return Wrong(file_, node, "unknown key '" + std::string(key.str()) + "'; there are " + all);
      }
    }
    return {};
  }
  Result<std::string> Text(std::string_view key, std::optional<std::string> absent = {}) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr && absent) return *absent;
    if (node == nullptr) return Wrong(file_, table_, std::string(key) + " is missing");
    if (!node->is_string()) return Wrong(file_, *node, std::string(key) + " must be a text");
    return std::string(*node->value<std::string_view>());
  }
  Status Grants(Grant* grant) const {
    PREFIXD_ASSIGN(grant->tenant, Text("tenant"));
    if (grant->tenant.size() > kMaxTenantBytes) {
      return Wrong(file_, *table_.get("tenant"), "the tenant's name is longer than 256 bytes");
    }
    const toml::node* rights = table_.get("rights");
    if (rights == nullptr) return {};
    std::string list;
    const bool texts = rights->is_array() &&
                       std::ranges::all_of(*rights->as_array(), [&](const toml::node& right) {
                         if (!right.is_string()) return false;
                         list += (list.empty() ? "" : ",");
                         list += *right.value<std::string_view>();
                         return true;
                       });
    if (!texts) return Wrong(file_, *rights, R"(rights must be a list, as ["read", "write"])");
    const Status set = SetRights(list, grant);
    return set.ok() ? set : Wrong(file_, *rights, set.error().message);
  }
  Result<uid_t> User(const FindUser& find_user) const {
    const toml::node* node = table_.get("user");
    if (node == nullptr) return Wrong(file_, table_, "user is missing");
    if (node->is_integer()) {
      const int64_t number = *node->value<int64_t>();
      if (number >= 0 && number < std::numeric_limits<uid_t>::max()) {
        return static_cast<uid_t>(number);
      }
      return Wrong(file_, *node, "user " + std::to_string(number) + " is no user's number");
    }
    PREFIXD_ASSIGN(const std::string name, Text("user"));
    const std::optional<uid_t> number = find_user(name);
    if (!number) return Wrong(file_, *node, "there is no user '" + name + "' here");
    return *number;
  }
  Error Refuse(std::string_view key, const std::string& what) const {
    const toml::node* node = table_.get(key);
    return Wrong(file_, node ? *node : table_, what);
  }

 private:
  const std::string& file_;
  const toml::table& table_;
};

Result<TokenGrant> ReadToken(const Entry& entry) {
  PREFIXD_TRY(entry.Known({"tenant", "name", "hash", "rights"}));
  TokenGrant token;
  PREFIXD_TRY(entry.Grants(&token.grant));
  PREFIXD_ASSIGN(token.name, entry.Text("name", ""));
  PREFIXD_ASSIGN(const std::string text, entry.Text("hash"));
  const auto hash = ParseHash(text);
  if (!hash.ok()) return entry.Refuse("hash", hash.error().message);
  token.hash = *hash;
  return token;
}

Result<UserGrant> ReadUser(const Entry& entry, const FindUser& find_user) {
  PREFIXD_TRY(entry.Known({"tenant", "user", "rights"}));
  UserGrant user;
  PREFIXD_TRY(entry.Grants(&user.grant));
  PREFIXD_ASSIGN(user.user, entry.User(find_user));
  return user;
}

// Reads each table of an array of tables, and refuses the second of two alike.
template <typename T, typename Read, typename Alike>
Status ReadAll(const std::string& file, const toml::node& node, const Read& read,
               const Alike& alike, std::vector<T>* out) {
  if (!node.is_array_of_tables()) {
    return Wrong(file, node, "write [[tokens]] or [[users]], two brackets on each side");
  }
  for (const toml::node& item : *node.as_array()) {
    PREFIXD_ASSIGN(T value, read(Entry(file, *item.as_table())));
    const bool twice =
        std::ranges::any_of(*out, [&](const T& other) { return alike(value, other); });
    if (twice) return Wrong(file, item, "the same stands here twice");
    out->push_back(std::move(value));
  }
  return {};
}

}  // namespace

const TokenGrant* AccessTable::Find(const TokenHash& hash) const {
  const TokenGrant* found = nullptr;
  for (const TokenGrant& token : tokens) {
    if (SameHash(token.hash, hash)) found = &token;
  }
  return found;
}

const UserGrant* AccessTable::Find(uid_t user, std::string_view tenant) const {
  const auto found = std::ranges::find_if(users, [&](const UserGrant& u) {
    return u.user == user && (tenant.empty() || u.grant.tenant == tenant || u.grant.admin);
  });
  return found == users.end() ? nullptr : &*found;
}

std::optional<uid_t> FindSystemUser(const std::string& name) {
  std::array<char, 16384> buffer;
  passwd entry{};
  passwd* found = nullptr;
  ::getpwnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  return found == nullptr ? std::nullopt : std::optional(found->pw_uid);
}

Result<AccessTable> ParseTokens(std::string_view text, const std::string& file,
                                const FindUser& find_user) {
  toml::table all;
  try {
    all = toml::parse(text, file);
  } catch (const toml::parse_error& e) {
    return InvalidArgument(file + ":" + std::to_string(e.source().begin.line) + ": " +
                           std::string(e.description()));
  }
  AccessTable table;
  for (const auto& [key, node] : all) {
    if (key == "tokens") {
      PREFIXD_TRY(ReadAll(
          file, node, ReadToken,
          [](const TokenGrant& a, const TokenGrant& b) { return a.hash == b.hash; },
          &table.tokens));
    } else if (key == "users") {
      PREFIXD_TRY(ReadAll(
          file, node, [&](const Entry& entry) { return ReadUser(entry, find_user); },
          [](const UserGrant& a, const UserGrant& b) {
            return a.user == b.user && a.grant.tenant == b.grant.tenant;
          },
          &table.users));
    } else {
      return Wrong(
          file, node,
          "unknown key '" + std::string(key.str()) + "'; there are [[tokens]] and [[users]]");
    }
  }
  return table;
}

Result<AccessTable> ReadTokens(const std::filesystem::path& file, Who who) {
  const Descriptor fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) {
    const std::string how = errno != EACCES ? ""
                                            : ": make this user (" + std::to_string(::geteuid()) +
                                                  ") its owner (chown)";
    return Error{Code::kIo,
                 "cannot read auth.tokens " + file.string() + ": " + std::strerror(errno) + how};
  }
  PREFIXD_TRY(CheckOwner(file, fd.get(), who));
  PREFIXD_ASSIGN(const std::string text, ReadRest(file, fd.get()));
  return ParseTokens(text, file.string());
}

std::string TokenLines(const TokenGrant& token) {
  std::ostringstream out;
  out << "\n[[tokens]]\ntenant = " << toml::value<std::string>(token.grant.tenant);
  if (!token.name.empty()) out << "\nname = " << toml::value<std::string>(token.name);
  out << "\nhash = \"" << HashText(token.hash) << "\"\nrights = [";
  std::string rights = RightsText(token.grant);
  for (size_t at = 0; (at = rights.find(',', at)) != std::string::npos; at += 4) {
    rights.replace(at, 1, "\", \"");
  }
  out << "\"" << rights << "\"]\n";
  return out.str();
}

Status AppendToken(const std::filesystem::path& file, const TokenGrant& token) {
  const Descriptor fd(::open(file.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (fd.get() < 0) {
    return Error{Code::kIo, "cannot write " + file.string() + ": " + std::strerror(errno)};
  }
  PREFIXD_TRY(CheckOwner(file, fd.get(), Who::kOperator));
  PREFIXD_ASSIGN(const std::string before, ReadRest(file, fd.get()));
  const std::string lines = (before.empty() || before.ends_with('\n') ? "" : "\n") +
                            (before.empty() ? TokenLines(token).substr(1) : TokenLines(token));
  // What would not be read afterwards is not written.
  PREFIXD_TRY(ParseTokens(before + lines, file.string()));
  const ssize_t written = ::write(fd.get(), lines.data(), lines.size());
  if (written == static_cast<ssize_t>(lines.size())) return {};
  const int why = written < 0 ? errno : ENOSPC;
  // Half a token would make the daemon refuse the whole file.
  const bool undone = written <= 0 || ::ftruncate(fd.get(), static_cast<off_t>(before.size())) == 0;
  return Error{Code::kIo, "cannot write " + file.string() + ": " + std::strerror(why) +
                              (undone ? "" : "; its last lines are damaged: remove them")};
}

Status SetRights(std::string_view text, Grant* grant) {
  grant->read = grant->write = grant->admin = false;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string_view right = text.substr(at, comma - at);
    if (right == "read") {
      grant->read = true;
    } else if (right == "write") {
      grant->write = true;
    } else if (right == "admin") {
      grant->admin = true;
    } else {
      return InvalidArgument("'" + std::string(right) +
                             "' is no right; there are read, write and admin");
    }
    at = comma + 1;
  }
  return {};
}

std::string RightsText(const Grant& grant) {
  std::string text;
  const auto add = [&](bool has, const char* name) {
    if (has) text += (text.empty() ? "" : ",") + std::string(name);
  };
  add(grant.read, "read");
  add(grant.write, "write");
  add(grant.admin, "admin");
  return text;
}

}  // namespace prefixd::daemon
