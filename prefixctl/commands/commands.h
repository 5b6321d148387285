// Carries out prefixctl's commands, one function per command.
#pragma once

#include <string>

#include "client_lib/remote_store.h"
#include "prefixd/compress.h"
#include "prefixd/result.h"

namespace prefixd::ctl {

inline constexpr int kExitOk = 0;
inline constexpr int kExitError = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNotFound = 3;  // the named thing or the daemon does not exist

// What a local file's error means to the caller: that it is missing does not mean that a model, a
// prefix or the daemon is (kExitNotFound).
inline Error OfLocalFile(Error error) {
  if (error.code == Code::kNotFound) error.code = Code::kIo;
  return error;
}

struct Options {
  std::string socket = "/run/prefixd/prefixd.sock";
  std::string address;  // overrides socket
  std::string tenant, token_file, tls_ca, tls_certificate, tls_key;
  bool all_tenants = false, json = false, quiet = false;
  std::string name, prefix, geometry_file, ttl, dir, file;  // each for some commands only
  std::string label, rights = "read,write";                 // of a new token
  std::string key_file;  // of an encrypted store that no daemon runs on
  bool verify_data = false, prune = false;
  bool verify = false;    // what a backup has
  bool once = false;      // top: one picture
  uint64_t interval = 2;  // top: seconds between two
  bool accept_approximate = false;
  std::string lineage;
  EngineSpeed engine;  // explain
  CompressSpec compress;
};

// Each prints to stdout and returns its error; main prints the error and picks the exit code.
Status ShowStatus(RemoteStore& client, const Options& options);
Status ShowStats(RemoteStore& client, const Options& options);
Status ListModels(RemoteStore& client, const Options& options);
Status ShowModel(RemoteStore& client, const Options& options);
Status RegisterModel(RemoteStore& client, const Options& options);
Status RemoveModel(RemoteStore& client, const Options& options);
Status ListPrefixes(RemoteStore& client, const Options& options);
Status ShowPrefix(RemoteStore& client, const Options& options);
Status ExportPrefixToFile(RemoteStore& client, const Options& options);
Status PutPrefixFromFile(RemoteStore& client, const Options& options);
Status RemovePrefix(RemoteStore& client, const Options& options);
Status PinPrefix(RemoteStore& client, const Options& options);
Status UnpinPrefix(RemoteStore& client, const Options& options);
Status LimitPrefix(RemoteStore& client, const Options& options);  // sets the time to live
Status VerifyPrefixes(RemoteStore& client, const Options& options);

}  // namespace prefixd::ctl
