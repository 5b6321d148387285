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
#include "prefixctl/bench/bench.h"
#include "prefixctl/commands/commands.h"
#include "prefixctl/commands/operate.h"
#include "prefixctl/commands/top.h"
#include "prefixctl/completion/completion.h"
#include "prefixctl/local_commands.h"
#include "prefixctl/show/output.h"

namespace prefixd::ctl {
namespace {

using Command = std::function<Status(RemoteStore&, const Options&)>;

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
                  "The daemon's address instead: unix:PATH, tcp:HOST:PORT or tls:HOST:PORT.")
      ->type_name("ADDRESS");
  app->add_option("--tenant", o->tenant, "Speak for this tenant.")->type_name("NAME");
  app->add_flag("--all-tenants", o->all_tenants,
                "See every tenant (the daemon's own user, and tokens with the right admin).");
  app->add_option("--token-file", o->token_file, "File with the token that TCP clients present.")
      ->type_name("FILE");
  app->add_option("--tls-ca", o->tls_ca,
                  "PEM file of who may have signed the certificate of a tls: address (or "
                  "PREFIXD_TLS_CA). Else whom the system trusts.")
      ->type_name("FILE");
  app->add_option("--tls-certificate", o->tls_certificate,
                  "PEM file of this client's certificate, for a daemon that asks who it is.")
      ->type_name("FILE");
  app->add_option("--tls-key", o->tls_key, "PEM file of that certificate's key.")
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

void DeclareRewrites(CLI::App* prefixes, Options* o, Command* chosen) {
  CLI::App* recluster = AddCommand(
      prefixes, "recluster", "Lay rows that steps read together side by side on the disk, now.",
      "prefixctl prefixes recluster 0123456789abcdef0123456789abcdef", o, chosen, ReclusterPrefix);
  CLI::App* compact = AddCommand(
      prefixes, "compact", "Join the last segments of a prefix into one file, now.",
      "prefixctl prefixes compact 0123456789abcdef0123456789abcdef", o, chosen, CompactPrefix);
  CLI::App* encrypt = AddCommand(
      prefixes, "encrypt",
      "Encrypt what lies in clear, or under an older key, under the newest key of the daemon's key "
      "file, now.",
      "prefixctl prefixes encrypt --all-tenants", o, chosen, EncryptPrefixes);
  encrypt->add_option("prefix", o->prefix, "Id of the prefix; without it all of the tenant's.");
  for (CLI::App* command : {recluster, compact}) {
    command->add_option("prefix", o->prefix, "Id of the prefix.")->required();
  }
  for (CLI::App* command : {recluster, compact, encrypt}) {
    command->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
  }
}

void DeclareCompress(CLI::App* prefixes, Options* o, Command* chosen) {
  CLI::App* compress = AddCommand(
      prefixes, "compress",
      "Drop rows that steps can do without, for good, once it is measured what that changes.",
      "prefixctl prefixes compress 0123456789abcdef0123456789abcdef --keep 0.25 --policy gkv "
      "--max-error 0.1",
      o, chosen, CompressPrefix);
  compress->add_option("prefix", o->prefix, "Id of the prefix.")->required();
  compress->add_option("--keep", o->compress.keep, "Fraction of the rows that each KV head keeps.")
      ->capture_default_str();
  compress
      ->add_option(
          "--policy", o->compress.policy,
          "What ranks tokens: window (the newest), by queries that the put kept: local, snapkv, "
          "global, global-sum, global-mean, gkv, h2o, tova, or by trained scorers: kvpop.")
      ->check(CLI::IsMember({"window", "local", "snapkv", "global", "global-sum", "global-mean",
                             "gkv", "h2o", "tova", "kvpop"}))
      ->capture_default_str();
  compress
      ->add_option("--scorers", o->compress.scorers,
                   "Policy kvpop's scorers, on the daemon's machine (python -m prefixd.retention "
                   "--train writes them).")
      ->type_name("FILE");
  compress->add_option(
      "--max-error", o->compress.max_error,
      "Leave the prefix as it is where the mean error would be larger; 0: whatever "
      "it is.");
  compress->add_flag("--dry-run", o->compress.dry_run, "Only measure.");
  compress->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
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

  CLI::App* top = AddCommand(
      app, "top", "What the daemon does and saves, again and again until it is interrupted.",
      "prefixctl top --all-tenants", o, chosen, Top);
  top->add_flag("--once", o->once, "Once.");
  top->add_option("--interval", o->interval, "Seconds between two pictures.")
      ->type_name("SECONDS")
      ->check(CLI::Range(1, 3600))
      ->capture_default_str();

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
  DeclareRewrites(prefixes, o, chosen);
  DeclareCompress(prefixes, o, chosen);
  verify->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
}

void DeclareExplain(CLI::App* app, Options* o, Command* chosen) {
  CLI::App* explain =
      AddCommand(app, "explain", "Say why a prompt hits or misses, and what would change it.",
                 "prefixctl explain --model llama-3.2-1b --tokens prompt.json", o, chosen, Explain);
  explain->add_option("--model", o->name, "Name of the model.")->required();
  explain
      ->add_option("--tokens", o->file,
                   "File with the prompt's token ids: a JSON array, or numbers with white space "
                   "between them; - for standard input.")
      ->type_name("FILE")
      ->required();
  explain
      ->add_option("--identity", o->geometry_file,
                   "JSON object with the identity that the engine has now, to compare.")
      ->type_name("FILE");
  explain->add_flag("--accept-approximate", o->accept_approximate, "Take derived rows, too.");
  explain->add_option("--lineage", o->lineage, "Take derived rows of this lineage.");
  explain
      ->add_option("--prefill-rate", o->engine.prefill_tokens_per_second,
                   "Tokens per second that the engine prefills; without it what was learnt.")
      ->type_name("TOKENS");
  explain
      ->add_option("--answer-tokens", o->engine.answer_tokens,
                   "Tokens that the engine expects to generate, to compare attaching, too.")
      ->type_name("TOKENS");
}

// A store that no daemon runs on is named by --dir, and needs no daemon.
void DeclareBackup(CLI::App* app, Options* o, Command* chosen, LocalCommand* local) {
  CLI::App* backup = app->add_subcommand(
      "backup",
      "Copy the running daemon's store, or one that no daemon runs on, into a backup. Only what is "
      "new since the last backup there is copied; each file is verified as it is written.");
  AddCommonFlags(backup, o, /*top=*/false);
  backup->footer("Example: prefixctl backup /srv/backup/prefixd");
  backup->add_option("backup", o->file, "Directory of the backup; made if missing.")
      ->type_name("PATH")
      ->required();
  backup->add_option("--dir", o->dir, "Directory of a store that no daemon runs on.")
      ->type_name("PATH");
  AddKeyFile(backup, o);
  backup->add_flag(
      "--verify", o->verify,
      "Read what earlier backups copied as well, and copy again what does not verify.");
  backup->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
  backup->callback([=] {
    if (o->dir.empty()) {
      *chosen = BackUpDaemon;
    } else {
      *local = BackUpDirectory;
    }
  });
  CLI::App* restore = app->add_subcommand(
      "restore",
      "Write a backup into a new store's directory, check every byte of it, and open it once.");
  restore->footer("Example: prefixctl restore /srv/backup/prefixd --dir /var/lib/prefixd");
  restore->add_option("backup", o->file, "Directory of the backup.")->type_name("PATH")->required();
  restore->add_option("--dir", o->dir, "Directory of the new store: missing, or empty.")
      ->type_name("PATH")
      ->required();
  AddKeyFile(restore, o);
  restore->add_flag("--json", o->json, "Print JSON instead of text.");
  restore->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
  restore->callback([=] { *local = RestoreStore; });
}

void DeclareDoctor(CLI::App* app, Options* o, bool* chosen) {
  CLI::App* doctor = app->add_subcommand(
      "doctor",
      "Try what prefixd needs of this machine and say what to do about what is missing. Exit "
      "codes: "
      "0 all well, 1 something costs speed or safety, 2 prefixd cannot work like this.");
  doctor->footer("Example: prefixctl doctor --dir /var/lib/prefixd");
  doctor->add_option("--dir", o->dir, "Directory of the store, or where it will be.")
      ->type_name("PATH");
  doctor->add_option("-s,--socket", o->socket, "The daemon's Unix socket.")
      ->type_name("PATH")
      ->capture_default_str();
  doctor->add_flag("--json", o->json, "Print JSON instead of text.");
  doctor->callback([=] { *chosen = true; });
}

// daemon_there: whether what did not answer was something else, such as a disk.
int Fail(const Error& error, bool daemon_there) {
  std::fflush(stdout);  // results come before the error
  std::fprintf(stderr, "prefixctl: %s\n", Printable(error.message).c_str());
  const bool absent =
      error.code == Code::kNotFound || (error.code == Code::kUnavailable && !daemon_there);
  return absent ? kExitNotFound : kExitError;
}

int Finish(const Status& status, bool daemon_there = true) {
  if (!status.ok()) return Fail(status.error(), daemon_there);
  const Status written = FinishOutput();
  return written.ok() ? kExitOk : Fail(written.error(), daemon_there);
}

// The file may have what `prefixctl token new` prints without --file, too: comments, and behind the
// token the lines for the daemon.
Result<std::string> ReadTokenFile(const std::string& file) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty() && !line.starts_with('#')) return line;
  }
  return InvalidArgument("there is no token in " + file + ", or it cannot be read");
}

int Run(const Options& options, const Command& command) {
  ConnectOptions connect;
  connect.tenant = options.tenant;
  connect.admin = options.all_tenants;
  connect.shared_memory = false;
  connect.tls_ca = options.tls_ca;
  connect.tls_certificate = options.tls_certificate;
  connect.tls_key = options.tls_key;
  if (!options.token_file.empty()) {
    auto token = ReadTokenFile(options.token_file);
    if (!token.ok()) return Fail(token.error(), /*daemon_there=*/false);
    connect.token = *std::move(token);
  }
  const std::string address = options.address.empty() ? "unix:" + options.socket : options.address;
  auto client = RemoteStore::Connect(address, connect);
  if (!client.ok()) return Fail(client.error(), /*daemon_there=*/false);
  const Status done = command(**client, options);
  // A call that found a disk silent failed as one whose daemon is gone: the daemon tells which.
  if (done.ok() || done.error().code != Code::kUnavailable) return Finish(done);
  const auto answer = (*client)->Stats();
  return Finish(done, answer.ok() || answer.error().code != Code::kUnavailable);
}

}  // namespace
}  // namespace prefixd::ctl

int main(int argc, char** argv) {
  using namespace prefixd::ctl;
  CLI::App app("prefixctl looks after a running prefixd.");
  Options options;
  Command command;
  LocalCommand local;
  std::function<int()> bench;
  bool doctor = false;
  Declare(&app, &options, &command);
  DeclareRecover(&app, &options, &local);
  DeclareToken(&app, &options, &local);
  DeclareKey(&app, &options, &local);
  DeclareExplain(&app, &options, &command);
  DeclareBackup(&app, &options, &command, &local);
  DeclareDoctor(&app, &options, &doctor);
  DeclareBench(&app, &bench);
  DeclareCompletion(&app, &options, &local);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kExitOk : kExitUsage;
  }
  if (doctor) return Examine(options);
  if (bench) return bench();
  if (!local) return Run(options, command);
  return Finish(local(options));
}
