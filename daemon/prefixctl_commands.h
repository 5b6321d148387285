// What prefixctl does, one function per command.
#pragma once

#include <string>

#include "attention/result.h"
#include "client_lib/remote_client.h"

namespace prefixd::ctl {

inline constexpr int kExitOk = 0;
inline constexpr int kExitError = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNotFound = 3;  // no such thing, or no daemon there

struct Options {
  std::string socket = "/run/prefixd/prefixd.sock";
  std::string address;  // overrides socket
  std::string tenant, token_file;
  bool all_tenants = false, json = false, quiet = false;
  std::string name, prefix, geometry_file, ttl, dir, file;  // of single commands
  bool verify_data = false, prune = false;
};

// Prints to stdout; an error is returned (main says it and picks the exit code).
Status ShowStatus(RemoteClient& client, const Options& options);
Status ShowStats(RemoteClient& client, const Options& options);
Status ListModels(RemoteClient& client, const Options& options);
Status ShowModel(RemoteClient& client, const Options& options);
Status RegisterModel(RemoteClient& client, const Options& options);
Status ListPrefixes(RemoteClient& client, const Options& options);
Status ShowPrefix(RemoteClient& client, const Options& options);
Status ExportPrefixToFile(RemoteClient& client, const Options& options);
Status PutPrefixFromFile(RemoteClient& client, const Options& options);
Status RemovePrefix(RemoteClient& client, const Options& options);
Status PinPrefix(RemoteClient& client, const Options& options);
Status UnpinPrefix(RemoteClient& client, const Options& options);
Status LimitPrefix(RemoteClient& client, const Options& options);  // its time to live
Status VerifyPrefixes(RemoteClient& client, const Options& options);

}  // namespace prefixd::ctl
