#include "prefixctl/local_commands.h"

#include <string>

#include "prefixctl/commands/key.h"
#include "prefixctl/commands/recover.h"
#include "prefixctl/commands/token.h"

namespace prefixd::ctl {

void AddKeyFile(CLI::App* app, Options* o) {
  app->add_option("--key-file", o->key_file,
                  "Key file of an encrypted store (the daemon's store.encryption_key_file).")
      ->type_name("FILE");
}

void DeclareRecover(CLI::App* app, Options* o, LocalCommand* chosen) {
  CLI::App* recover = app->add_subcommand(
      "recover",
      "Make the catalog of a store anew from its segment files. For a store whose catalog or STORE "
      "file is lost or damaged; no daemon may be running on it. The old catalog is kept.");
  recover->footer("Example: prefixctl recover --dir /srv/prefixd");
  recover->add_option("--dir", o->dir, "Directory of the store.")->type_name("PATH")->required();
  AddKeyFile(recover, o);
  recover->add_flag("--verify-data", o->verify_data,
                    "Read and check every stored byte, not only what describes the rows.");
  recover->add_flag("--prune", o->prune,
                    "Free the files of unfinished puts now (else the next start does).");
  recover->add_flag("--json", o->json, "Print JSON instead of text.");
  recover->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
  recover->callback([=] { *chosen = RecoverStore; });
}

void DeclareToken(CLI::App* app, Options* o, LocalCommand* chosen) {
  CLI::App* token = app->add_subcommand(
      "token", "Tokens for the daemon's file auth.tokens; no daemon is needed.");
  token->require_subcommand(1);
  token->footer("Example: prefixctl token new team-a --file /etc/prefixd/tokens.toml");
  CLI::App* made = token->add_subcommand(
      "new", "Make a token for a tenant. Print it, and the lines for the daemon's file.");
  made->footer(
      "Example: prefixctl token new team-a --rights read --file /etc/prefixd/tokens.toml "
      "> team-a.token");
  made->add_option("tenant", o->name, "The tenant that its bearer speaks for.")->required();
  made->add_option("--file", o->file,
                   "Append the lines to this file, made if need be, and print the token alone.")
      ->type_name("FILE");
  made->add_option("--rights", o->rights, "Of read, write and admin, which is for all tenants.")
      ->type_name("LIST")
      ->capture_default_str();
  made->add_option("--name", o->label, "A name for the file, to tell tokens apart.")
      ->type_name("NAME");
  made->add_flag("--json", o->json, "Print JSON instead of text.");
  made->callback([=] { *chosen = NewToken; });
  CLI::App* check = token->add_subcommand(
      "check", "Say what a file lets whom do, or why the daemon would refuse it.");
  check->footer("Example: prefixctl token check /etc/prefixd/tokens.toml");
  check->add_option("file", o->file, "The file.")->type_name("FILE")->required();
  check->add_flag("--json", o->json, "Print JSON instead of text.");
  check->callback([=] { *chosen = CheckTokens; });
}

void DeclareKey(CLI::App* app, Options* o, LocalCommand* chosen) {
  CLI::App* key = app->add_subcommand(
      "key", "Key files, for stores that are encrypted on the disk; no daemon is needed.");
  key->require_subcommand(1);
  key->footer("Example: prefixctl key new /etc/prefixd/store.key");
  const auto add = [&](const char* name, const char* help, const char* example,
                       Status (*run)(const Options&)) {
    CLI::App* sub = key->add_subcommand(name, help);
    sub->footer(std::string("Example: ") + example);
    sub->add_option("file", o->file, "The key file.")->type_name("FILE")->required();
    sub->add_flag("--json", o->json, "Print JSON instead of text.");
    sub->callback([=] { *chosen = run; });
  };
  add("new", "Make a key file with one new key. No file is overwritten.",
      "prefixctl key new /etc/prefixd/store.key", NewKeyFile);
  add("add", "Put a new key before those of a file: the first step of changing keys.",
      "prefixctl key add /etc/prefixd/store.key", AddKey);
  add("check", "Say which keys a file has, or why the daemon would refuse it.",
      "prefixctl key check /etc/prefixd/store.key", CheckKeyFile);
}

}  // namespace prefixd::ctl
