// Declares every option of the daemon, with its bounds, unit and meaning.
#include <algorithm>
#include <array>
#include <iterator>

#include "base/tables/field_count.h"
#include "base/tables/runtime_options.h"
#include "daemon/settings/config.h"

namespace prefixd::daemon {
namespace {

// The order of sections in a file; TOML requires keys without a section to come first.
constexpr std::array<std::string_view, 11> kSections = {
    "", "listen", "auth", "tls", "http", "store", "scrub", "compute", "ingest", "limits", "log"};

}  // namespace

std::vector<Option> OptionsOf(Config& c) {
  constexpr OptionUnit kMiB{"MiB"}, kSeconds{"seconds"}, kThreads{"threads"};
  const std::array own = {
      Plain("", "listen.socket", &c.socket, "path, at most 107 bytes",
            "Unix socket. Empty: none (then tcp is needed)."),
      Choice(
          "", "listen.socket_access", &c.socket_access, {"user", "group"},
          "Who connects to the Unix socket: only this user (mode 0600), or all of its group too "
          "(0660). Without auth.tokens a member of the group speaks for any tenant that it names, "
          "and never for all of them."),
      Plain("", "listen.socket_group", &c.socket_group, "group",
            "The socket's group, by name or number. Empty: the daemon's."),
      Plain("", "listen.tcp", &c.tcp, "host:port",
            "TCP address for remote clients. Empty: none. Port 0: any free port.")
          .WithFlag("listen"),
      Switch("", "listen.tcp_insecure", &c.tcp_insecure,
             "Lets listen.tcp be an address other than loopback without tls.certificate, or "
             "with neither auth.tokens nor tls.client_ca, though anyone may then overhear, or "
             "read, every prompt."),

      Plain(
          "", "auth.tokens", &c.tokens_file, "path",
          "File (mode 0600) of tokens and local users with their tenants and rights, read again on "
          "SIGHUP; `prefixctl token new` writes it. Empty: clients speak for the tenant that they "
          "name."),

      Plain("", "tls.certificate", &c.tls_certificate, "path",
            "PEM file of the daemon's certificate and those between it and its authority's, read "
            "again on SIGHUP. All of listen.tcp is TLS then (1.2 or 1.3). Empty: in the clear.")
          .WithFlag("tls-certificate"),
      Plain("", "tls.key", &c.tls_key, "path",
            "PEM file of the certificate's key, which not everybody may read.")
          .WithFlag("tls-key"),
      Plain("", "tls.client_ca", &c.tls_client_ca, "path",
            "PEM file of who may have signed the certificates that clients must show, beside their "
            "tokens. Empty: they are not asked for one.")
          .WithFlag("tls-client-ca"),
      Plain("", "http.listen", &c.http_listen, "host:port",
            "Address for the status page, /metrics, /healthz and /readyz over HTTP, such as "
            "127.0.0.1:9460. Empty: none. Port 0: any free port. Away from loopback it takes a "
            "token.")
          .WithFlag("http"),
      Plain("", "http.token_file", &c.http_token_file, "path",
            "File (mode 0600) whose first line is a token: who presents it over HTTP sees all "
            "tenants, and can change nothing. Read again on SIGHUP. Tokens of auth.tokens are "
            "taken, too.")
          .WithFlag("http-token-file"),
      Number(
          "", "http.max_connections", &c.http_max_connections, {"connections"}, {1, 64},
          "Connections over HTTP. Beyond it the longest one whose request has not come is closed "
          "for each new one; where all have come, the new one is refused.")
          .WithFlag("http-max-connections"),
      Number("", "http.timeout_s", &c.http_timeout_s, kSeconds, {1, 600},
             "How long a request over HTTP may take to arrive, and its answer to be made and to be "
             "read.")
          .WithFlag("http-timeout"),

      Number("", "limits.max_connections", &c.max_connections, {"connections"}, {1, 65536},
             "Connections beyond it are told so and closed. Fewer where the process may not open "
             "so many files."),
      Number("", "limits.max_tcp_connections", &c.max_tcp_connections, {"connections"}, {0, 65536},
             "Those of them over TCP. 0: three quarters, so that local clients always find a "
             "place; no "
             "more than that where files lower the total."),
      Number("", "limits.max_tenant_connections", &c.max_tenant_connections, {"connections"},
             {0, 65536},
             "Those of them for one tenant. 0: three quarters, and no more where files lower the "
             "total."),
      Number("", "limits.max_silent_connections", &c.max_silent_connections, {"connections"},
             {1, 65536},
             "Connections over TCP, and local ones, that have not said hello for a second: beyond "
             "it the longest silent one is closed for each new one."),
      Number("", "limits.max_calls", &c.max_calls, {"calls"}, {1, 4096},
             "Calls in flight on one connection; further ones are refused."),
      Number("", "limits.max_puts", &c.max_puts, {"puts"}, {1, 4096},
             "Unfinished puts of one connection."),
      Number(
          "", "limits.max_frame_mib", &c.max_frame_mib, kMiB, {1, 4096},
          "Largest payload of one message, and of all messages of a connection being worked on."),
      Number("", "limits.shared_memory_mib", &c.shared_memory_mib, kMiB, {0, 65536},
             "Shared memory of each local connection, taken as it is touched. 0: none."),
      Number(
          "", "limits.ring_mib", &c.ring_mib, kMiB, {0, 1024},
          "Shared memory of each local connection for steps under way, in 16 equal slots; a batch "
          "that is larger than a slot goes as a message. 0: none, all steps do."),
      Number(
          "", "limits.step_threads", &c.step_threads, kThreads, {1, 1024},
          "Threads that carry out steps of rings; as many as cores stand by. Steps that wait for "
          "cores hold one, and those on one prefix are run together."),
      Number("", "limits.polling_threads", &c.polling_threads, kThreads, {0, 1024},
             "How many of them may poll at a time, each for the next step of one client that asks "
             "for it, while another is free. 0: none."),
      Number(
          "", "limits.workers", &c.workers, kThreads, {1, 1024},
          "Threads that carry out calls: of a connection one at a time, and up to four more that "
          "read a layer into shared memory. Steps that wait for cores hold one, and those on one "
          "prefix are run together: as many as connections that decode at the same time. One "
          "tenant gets three quarters."),
      Number(
          "", "limits.long_workers", &c.long_workers, kThreads, {1, 64},
          "Threads for verify, wait_ready, explain, rewrite, compress and persist; each such call "
          "holds one until it ends. One tenant gets three quarters."),
      Number("", "limits.hello_timeout_s", &c.hello_timeout_s, kSeconds, {1, 3600},
             "A connection that has not said hello by then is closed.")
          .WithFlag("hello-timeout"),
      Number("", "limits.frame_timeout_s", &c.frame_timeout_s, kSeconds, {1, 3600},
             "A message whose bytes do not arrive in this time, and a second more for each MiB of "
             "it, closes its connection.")
          .WithFlag("frame-timeout"),
      Number("", "limits.write_timeout_s", &c.write_timeout_s, kSeconds, {1, 3600},
             "A client that takes no byte of its answers for so long is disconnected.")
          .WithFlag("write-timeout"),
      Number("", "limits.put_idle_s", &c.put_idle_s, kSeconds, {1, 604800},
             "A put that nothing was written to for so long is aborted; it holds disk space from "
             "others.")
          .WithFlag("put-idle"),
      Number("", "limits.shutdown_grace_s", &c.shutdown_grace_s, kSeconds, {0, 3600},
             "How long SIGTERM waits for calls in flight.")
          .WithFlag("shutdown-grace"),

      Choice("", "log.level", &c.log_level, {"trace", "debug", "info", "warn", "error", "off"},
             "What is logged: this level and everything more important.")
          .WithFlag("log-level"),
      Plain("", "log.file", &c.log_file, "path", "Log file, appended to. Empty: standard error.")
          .WithFlag("log-file"),
      Choice("", "log.format", &c.log_format, {"text", "json"},
             "text: lines for people. json: an object a line, with time, level, message and, where "
             "a line has parts, each as a member.")
          .WithFlag("log-format"),
      Number("", "log.slow_step_ms", &c.slow_step_ms, {"milliseconds"}, {0, 3600000},
             "Calls of steps that take as long are logged (warn), with session, layer and the time "
             "of each stage; a few dozen lines a minute at most. 0: none.")
          .WithFlag("log-slow-step"),
  };
  static_assert(own.size() == FieldCount<Config>() - 1, "every member of Config has an entry");
  std::vector<Option> options = OptionsOf(c.store);
  options.insert(options.end(), own.begin(), own.end());
  std::ranges::stable_sort(options, {}, [](const Option& option) {
    return std::ranges::find(kSections, option.section()) - kSections.begin();
  });
  return options;
}

}  // namespace prefixd::daemon
