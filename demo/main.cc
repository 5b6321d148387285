// Runs prefixd-demo: one subcommand for each process of the demo's story. demo/story/main.py starts
// them, gives each a request on standard input, and shows what they emit; see scripts/demo.sh.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "base/build_info.h"
#include "demo/commands.h"
#include "demo/document.h"
#include "demo/events.h"

namespace prefixd::demo {
namespace {

// Emits the document with facts planted in it, as text.
Status RunPlant(const DocumentOptions& options) {
  PREFIXD_ASSIGN(const Document document, LoadDocument(options));
  nlohmann::json facts = nlohmann::json::array();
  for (const Fact& fact : document.facts) {
    facts.push_back({{"question", fact.Question()}, {"answer", fact.answer}});
  }
  Emit({{"event", "document"},
        {"prompt", document.prompt},
        {"continuation", document.continuation},
        {"facts", facts}});
  return {};
}

Status WithRequest(Status (*run)(const std::string& address, const Request& request),
                   const std::string& socket) {
  const std::string text(std::istreambuf_iterator<char>(std::cin), {});
  PREFIXD_ASSIGN(const Request request, ParseRequest(text));
  return run("unix:" + std::filesystem::absolute(socket).string(), request);
}

}  // namespace
}  // namespace prefixd::demo

int main(int argc, char** argv) {
  namespace demo = prefixd::demo;
  CLI::App app(
      "The parts of the demo that work on token ids. Run scripts/demo.sh, which owns the text.");
  app.set_version_flag("--version", prefixd::VersionText("prefixd-demo"));
  app.require_subcommand(1);
  app.footer(
      "Each command but `plant` reads a request (demo/request.h) from standard input. All write\n"
      "lines of JSON. Exit codes: 0 done, 1 error: one line on standard error says why.");

  std::string socket;
  const auto add = [&](const char* name, const char* help) {
    CLI::App* sub = app.add_subcommand(name, help);
    sub->add_option("--socket", socket, "Socket of the daemon (or PREFIXD_SOCKET)")
        ->required()
        ->envname("PREFIXD_SOCKET");
    return sub;
  };
  const CLI::App* prefill = add("prefill", "Prefill a prompt cold and persist its KV cache");
  const CLI::App* decode = add("decode", "Attach to the stored prompt, answer and measure");
  const CLI::App* cold = add("cold", "Measure the same against a daemon without host tier");
  const CLI::App* ask = add("ask", "Answer one question about the stored prompt");
  const CLI::App* compare =
      app.add_subcommand("compare", "Compare ways of reading documents, for prefixd.evaluate");
  demo::DocumentOptions document;
  CLI::App* plant = app.add_subcommand("plant", "Plant facts in a document, for the byte model");
  plant->add_option("--document", document.file, "UTF-8 text")->required();
  plant->add_option("--tokens", document.prompt_tokens, "At most this many bytes of prompt")
      ->required();
  plant->add_option("--facts", document.facts, "Facts planted in the document and asked")
      ->check(CLI::Range(1, 200))
      ->capture_default_str();
  plant->add_option("--continuation", document.continuation_tokens, "Bytes held out after it")
      ->check(CLI::Range(2, 4096))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  const prefixd::Status status = plant->parsed()     ? demo::RunPlant(document)
                                 : compare->parsed() ? demo::RunCompare(std::cin)
                                 : prefill->parsed() ? demo::WithRequest(demo::RunPrefill, socket)
                                 : decode->parsed()  ? demo::WithRequest(demo::RunDecode, socket)
                                 : cold->parsed()    ? demo::WithRequest(demo::RunCold, socket)
                                 : ask->parsed()     ? demo::WithRequest(demo::RunAsk, socket)
                                                     : prefixd::Status{};
  if (!status.ok()) {
    std::fprintf(stderr, "prefixd-demo: %s\n", status.error().ToString().c_str());
    return 1;
  }
  return 0;
}
