// Makes and looks at key files (store.encryption_key_file). No daemon is needed.
#pragma once

#include "prefixctl/commands/commands.h"
#include "prefixd/result.h"

namespace prefixd::ctl {

// Makes options.file with a new key; puts one before those that it has; or says which it has.
Status NewKeyFile(const Options& options);
Status AddKey(const Options& options);
Status CheckKeyFile(const Options& options);

}  // namespace prefixd::ctl
