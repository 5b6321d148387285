// Carries out what operators do: why a prompt missed, rewriting, backups, the machine's state.
#pragma once

#include "prefixctl/commands/commands.h"
#include "prefixd/result.h"

namespace prefixd::ctl {

Status Explain(RemoteStore& client, const Options& options);          // explain.cc
Status ReclusterPrefix(RemoteStore& client, const Options& options);  // rewrite.cc
Status CompactPrefix(RemoteStore& client, const Options& options);
Status EncryptPrefixes(RemoteStore& client, const Options& options);
Status CompressPrefix(RemoteStore& client, const Options& options);  // compress.cc

// backup.cc. kCorrupt when segments do not verify; the rest is in the backup.
Status BackUpDaemon(RemoteStore& client, const Options& options);
Status BackUpDirectory(const Options& options);  // of a store that no daemon runs on
Status RestoreStore(const Options& options);

// doctor.cc. Returns the exit code: 0, 1 with warnings, 2 when something is amiss.
int Examine(const Options& options);

}  // namespace prefixd::ctl
