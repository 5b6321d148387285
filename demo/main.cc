// Runs prefixd-demo: one subcommand for each process of scripts/demo.sh.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <string>

#include "base/build_info.h"
#include "demo/ask.h"
#include "demo/decode.h"
#include "demo/prefill.h"

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  CLI::App app(
      "The main job of prefixd on a real document. Run scripts/demo.sh for the whole story.");
  app.set_version_flag("--version", prefixd::VersionText("prefixd-demo"));
  app.require_subcommand(1);

  std::string socket;
  const auto add_socket = [&](CLI::App* sub) {
    sub->add_option("--socket", socket, "Socket of the daemon (or PREFIXD_SOCKET)")
        ->required()
        ->envname("PREFIXD_SOCKET");
  };
  prefixd::demo::PrefillOptions prefill;
  prefill.model_dir = "models/prefixd-tiny";
  prefill.document.file = "/usr/share/common-licenses/GPL-3";
  prefill.document.prompt_tokens = 0;
  CLI::App* first =
      app.add_subcommand("prefill", "Prefill a document cold and persist its KV cache");
  add_socket(first);
  first->add_option("--state", prefill.state_file, "File to leave the demo's state in")->required();
  first->add_option("--document", prefill.document.file, "UTF-8 text")->capture_default_str();
  first
      ->add_option("--model", prefill.model_dir,
                   "Hugging Face checkpoint of the Llama or Qwen3 family")
      ->capture_default_str();
  first
      ->add_option("--tokens", prefill.document.prompt_tokens,
                   "At most this many prompt tokens; 0: as many as the model is good for")
      ->capture_default_str();
  first->add_option("--facts", prefill.document.facts, "Facts planted in the document and asked")
      ->check(CLI::Range(1, 200))
      ->capture_default_str();
  first
      ->add_option("--continuation", prefill.document.continuation_tokens,
                   "Held-out tokens after the prompt that are scored")
      ->check(CLI::Range(2, 4096))
      ->capture_default_str();

  prefixd::demo::DecodeOptions decode;
  CLI::App* second =
      app.add_subcommand("decode", "Attach to the stored prompt and decode under budgets");
  add_socket(second);
  second->add_option("--state", decode.state_file, "File that `prefill` left")->required();
  second->add_option("--json", decode.json_file, "Where the report goes")->required();
  CLI::App* third = app.add_subcommand(
      "cold", "Measure the same steps against a daemon without host tier; adds to the report");
  add_socket(third);
  third->add_option("--state", decode.state_file, "File that `prefill` left")->required();
  third->add_option("--json", decode.json_file, "The report that `decode` wrote")->required();

  prefixd::demo::AskOptions ask;
  CLI::App* fourth = app.add_subcommand(
      "ask", "Ask one question about the stored prompt under a read budget, and say what was read");
  add_socket(fourth);
  fourth->add_option("--state", ask.state_file, "File that `prefill` left")->required();
  fourth->add_option(
      "--question", ask.question,
      "Text that the model continues, on a line of its own; default: a planted fact, "
      "begun again");
  fourth
      ->add_option("--budget", ask.budget,
                   "Part of the prompt that a step may read: 0.01, 1%, or all")
      ->capture_default_str();
  fourth
      ->add_option(
          "--tokens", ask.tokens,
          "Tokens to generate (of this model: bytes); the first follows from the question, "
          "every other one is a step under the budget")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  fourth->add_flag("--json", ask.json, "Print an object instead of text");
  fourth->footer(
      "Example: prefixd-demo ask --socket S --state state.json --budget 1%\n"
      "The question reads the whole prompt once, exactly; bytes are physical (pages from SSD, rows "
      "from\nhost memory). The model is small: it finds planted facts and answers no real "
      "questions.\nExit codes: 0 done, 1 error: one line on standard error says why.");
  CLI11_PARSE(app, argc, argv);

  prefill.address = decode.address = ask.address =
      "unix:" + std::filesystem::absolute(socket).string();
  const prefixd::Status status = first->parsed()    ? prefixd::demo::RunPrefill(prefill)
                                 : second->parsed() ? prefixd::demo::RunDecode(decode)
                                 : third->parsed()  ? prefixd::demo::RunCold(decode)
                                                    : prefixd::demo::RunAsk(ask);
  if (!status.ok()) {
    std::fprintf(stderr, "prefixd-demo: %s\n", status.error().ToString().c_str());
    return 1;
  }
  return 0;
}
