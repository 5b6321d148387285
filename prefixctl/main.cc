// prefixctl: manages a running prefixd. This file declares commands, flags and exit codes;
// commands.cc carries the commands out.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/build_info.h"
#include "daemon/settings/command_line.h"
#include "prefixctl/commands.h"
#include "prefixctl/completion.h"
#include "prefixctl/output.h"
#include "prefixctl/recover.h"

namespace prefixd::ctl {
namespace {

using Command = std::function<Status(RemoteStore&, const Options&)>;
using LocalCommand = std::function<Status(const Options&)>;  // needs no daemon

// Adds the flags that every command takes, before or after its name (`top`: on prefixctl itself).
// The environment is read only at the top, so that it never overrides a flag.
void AddCommonFlags(CLI::App* app, Options* o, bool top) {
  app->add_flag("--json", o->json, "Print JSON instead of text.");
  CLI::Option* socket =
      app->add_option("-s,--socket", o->socket, "The daemon's Unix socket (or PREFIXD_SOCKET).")
          ->type_name("PATH")
          ->capture_default_str();
  if (top) socket->envname("PREFIXD_SOCKET");
  app->add_option("--address", o->address,
                  "The daemon's address instead: unix:PATH or tcp:HOST:PORT.")
      ->type_name("ADDRESS");
  app->add_option("--tenant", o->tenant, "Speak for this tenant.")->type_name("NAME");
  app->add_flag("--all-tenants", o->all_tenants,
                "See every tenant (the daemon's own user, over its Unix socket).");
  app->add_option("--token-file", o->token_file, "File with the token that TCP clients present.")
      ->type_name("FILE");
}

CLI::App* AddCommand(CLI::App* parent, const char* name, const char* help, const char* example,
                     Options* options, Command* chosen, Command command) {
  CLI::App* sub = parent->add_subcommand(name, help);
  AddCommonFlags(sub, options, /*top=*/false);
  sub->footer(std::string("Example: ") + example);
  sub->callback([=] { *chosen = command; });
  return sub;
}

void DeclareRecover(CLI::App* app, Options* o, LocalCommand* chosen) {
  CLI::App* recover = app->add_subcommand(
      "recover",
      "Make the catalog of a store anew from its segment files. For a store whose catalog or STORE "
      "file is lost or damaged; no daemon may be running on it. The old catalog is kept.");
  recover->footer("Example: prefixctl recover --dir /srv/prefixd");
  recover->add_option("--dir", o->dir, "Directory of the store.")->type_name("PATH")->required();
  recover->add_flag("--verify-data", o->verify_data,
                    "Read and check every stored byte, not only what describes the rows.");
  recover->add_flag("--prune", o->prune,
                    "Free the files of unfinished puts now (else the next start does).");
  recover->add_flag("--json", o->json, "Print JSON instead of text.");
  recover->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
  recover->callback([=] { *chosen = RecoverStore; });
}

void DeclareCompletion(CLI::App* app, Options* o, LocalCommand* chosen) {
  CLI::App* completion = app->add_subcommand(
      "completion", "Print a script that completes prefixctl and prefixd in a shell.");
  completion->footer("Example: source <(prefixctl completion bash)");
  completion->add_option("shell", o->name, "The shell.")
      ->type_name("bash|zsh|fish")
      ->required()
      ->check([](const std::string& shell) {
        const bool known = shell == "bash" || shell == "zsh" || shell == "fish";
        return known ? "" : "there is completion for bash, zsh and fish";
      });
  completion->callback([=] {
    *chosen = [=](const Options& options) -> Status {
      CLI::App prefixd;
      daemon::CommandLine line;
      prefixd.set_version_flag("--version", "", "Print the version and exit.");
      daemon::DeclareOptions(&prefixd, &line);
      std::vector<CompletionCommand> commands = CommandsOf(*app, "prefixctl");
      const auto others = CommandsOf(prefixd, "prefixd");
      commands.insert(commands.end(), others.begin(), others.end());
      std::string script = options.name == "bash"  ? BashCompletion(commands)
                           : options.name == "zsh" ? ZshCompletion(commands)
                                                   : FishCompletion(commands);
      std::fputs(script.c_str(), stdout);
      return {};
    };
  });
}

void Declare(CLI::App* app, Options* o, Command* chosen) {
  app->set_version_flag("--version", VersionText("prefixctl"), "Print version and commit.");
  AddCommonFlags(app, o, /*top=*/true);
  app->require_subcommand(1);
  app->footer(
      "Example: prefixctl prefixes list --json\n"
      "Exit codes: 0 done, 1 error, 2 wrong usage, 3 not found or no daemon there.");
  AddCommand(app, "status", "Is the daemon running, and how does it stand?",
             "prefixctl status --socket /run/prefixd/prefixd.sock", o, chosen, ShowStatus);
  AddCommand(app, "stats", "Every counter of the store and of the daemon.",
             "prefixctl stats --json", o, chosen, ShowStats);

  CLI::App* models = app->add_subcommand("models", "Models that prefixes are stored under.");
  models->require_subcommand(1);
  models->footer("Example: prefixctl models list");
  AddCommand(models, "list", "All models.", "prefixctl models list --json", o, chosen, ListModels);
  AddCommand(models, "show", "One model: geometry, identity, feature maps.",
             "prefixctl models show llama-3.2-1b", o, chosen, ShowModel)
      ->add_option("model", o->name, "Name of the model.")
      ->required();
  CLI::App* reg = AddCommand(
      models, "register", "Register a model from a JSON file, or give it new feature maps.",
      "prefixctl models register --name llama-3.2-1b --geometry llama.json, with llama.json = "
      R"({"geometry": {"n_layers": 16, "n_q_heads": 32, "n_kv_heads": 8, "key_dim": 64, )"
      R"("value_dim": 64, "dtype": "bf16"}, "identity": {"weights": "sha256:..."}})",
      o, chosen, RegisterModel);
  reg->add_option("--geometry", o->geometry_file,
                  "JSON with geometry, identity and feature_maps (paths on the daemon's machine).")
      ->type_name("FILE")
      ->required();
  reg->add_option("--name", o->name, "Name of the model, if the file has none.");
  AddCommand(models, "remove", "Remove a model that nothing is stored for.",
             "prefixctl models remove llama-3.2-1b", o, chosen, RemoveModel)
      ->add_option("model", o->name, "Name of the model.")
      ->required();

  CLI::App* prefixes = app->add_subcommand("prefixes", "Stored prefixes.");
  prefixes->require_subcommand(1);
  prefixes->footer("Example: prefixctl prefixes list --tenant team-a");
  AddCommand(prefixes, "list", "All prefixes of the tenant.",
             "prefixctl prefixes list --all-tenants", o, chosen, ListPrefixes);
  AddCommand(prefixes, "show", "One prefix: chain, derived data, choices per head.",
             "prefixctl prefixes show 0123456789abcdef0123456789abcdef", o, chosen, ShowPrefix)
      ->add_option("prefix", o->prefix, "Id of the prefix.")
      ->required();
  AddCommand(prefixes, "remove", "Remove a prefix that nothing continues and nobody has open.",
             "prefixctl prefixes remove 0123456789abcdef0123456789abcdef", o, chosen, RemovePrefix)
      ->add_option("prefix", o->prefix, "Id of the prefix.")
      ->required();
  CLI::App* exported = AddCommand(
      prefixes, "export",
      "Write a prefix (rows, token ids, geometry) to a safetensors file, which is replaced.",
      "prefixctl prefixes export 0123456789abcdef0123456789abcdef prompt.safetensors", o, chosen,
      ExportPrefixToFile);
  exported->add_option("prefix", o->prefix, "Id of the prefix.")->required();
  exported->add_option("file", o->file, "The file; its owner alone may read it.")
      ->type_name("FILE")
      ->required();
  exported->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
  CLI::App* put = AddCommand(
      prefixes, "put", "Store a prefix that export wrote; its model is registered if need be.",
      "prefixctl prefixes put prompt.safetensors --tenant team-a", o, chosen, PutPrefixFromFile);
  put->add_option("file", o->file, "The file.")->type_name("FILE")->required();
  put->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
  AddCommand(prefixes, "pin", "Never evict a prefix to make room.",
             "prefixctl prefixes pin 0123456789abcdef0123456789abcdef", o, chosen, PinPrefix)
      ->add_option("prefix", o->prefix, "Id of the prefix.")
      ->required();
  AddCommand(prefixes, "unpin", "Let a prefix be evicted again when room is needed.",
             "prefixctl prefixes unpin 0123456789abcdef0123456789abcdef", o, chosen, UnpinPrefix)
      ->add_option("prefix", o->prefix, "Id of the prefix.")
      ->required();
  CLI::App* ttl = AddCommand(prefixes, "ttl", "Say how long a prefix lives from now on.",
                             "prefixctl prefixes ttl 0123456789abcdef0123456789abcdef 86400", o,
                             chosen, LimitPrefix);
  ttl->add_option("prefix", o->prefix, "Id of the prefix.")->required();
  ttl->add_option("seconds", o->ttl, "Seconds (at least 1), or never.")
      ->type_name("SECONDS|never")
      ->required();
  CLI::App* verify = AddCommand(
      prefixes, "verify", "Read and check every stored byte; damaged prefixes are quarantined.",
      "prefixctl prefixes verify --all-tenants", o, chosen, VerifyPrefixes);
  verify->add_option("prefix", o->prefix, "Id of the prefix; without it all of the tenant's.");
  verify->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
}

int Fail(const Error& error) {
  std::fflush(stdout);  // results come before the error
  std::fprintf(stderr, "prefixctl: %s\n", Printable(error.message).c_str());
  const bool absent = error.code == Code::kNotFound || error.code == Code::kUnavailable;
  return absent ? kExitNotFound : kExitError;
}

int Run(const Options& options, const Command& command) {
  ConnectOptions connect;
  connect.tenant = options.tenant;
  connect.admin = options.all_tenants;
  connect.shared_memory = false;
  if (!options.token_file.empty()) {
    std::ifstream in(options.token_file);
    if (!std::getline(in, connect.token)) {
      return Fail({Code::kInvalidArgument, "cannot read the token file " + options.token_file});
    }
  }
  const std::string address = options.address.empty() ? "unix:" + options.socket : options.address;
  auto client = RemoteStore::Connect(address, connect);
  if (!client.ok()) return Fail(client.error());
  Status status = command(**client, options);
  return status.ok() ? kExitOk : Fail(status.error());
}

}  // namespace
}  // namespace prefixd::ctl

int main(int argc, char** argv) {
  using namespace prefixd::ctl;
  CLI::App app("prefixctl looks after a running prefixd.");
  Options options;
  Command command;
  LocalCommand local;
  Declare(&app, &options, &command);
  DeclareRecover(&app, &options, &local);
  DeclareCompletion(&app, &options, &local);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kExitOk : kExitUsage;
  }
  if (!local) return Run(options, command);
  const prefixd::Status status = local(options);
  return status.ok() ? kExitOk : Fail(status.error());
}
