// Declares the commands that need no daemon and take a few flags of their own: recover, token, key.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "prefixctl/commands/commands.h"
#include "prefixd/result.h"

namespace prefixd::ctl {

using LocalCommand = std::function<Status(const Options&)>;

// The key file of an encrypted store, for commands that open one themselves.
void AddKeyFile(CLI::App* app, Options* o);

void DeclareRecover(CLI::App* app, Options* o, LocalCommand* chosen);
void DeclareToken(CLI::App* app, Options* o, LocalCommand* chosen);
void DeclareKey(CLI::App* app, Options* o, LocalCommand* chosen);

}  // namespace prefixd::ctl
