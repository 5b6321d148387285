// Lists what a store holds, through the C++ interface: list_prefixes DIR | unix:/path |
// tcp:host:port
#include <cstdio>
#include <string>

#include "prefixd/client.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIR | unix:/path | tcp:host:port\n", argv[0]);
    return 2;
  }
  const std::string where = argv[1];
  const bool remote =
      where.starts_with("unix:") || where.starts_with("tcp:") || where.starts_with("tls:");
  prefixd::RuntimeOptions options;
  options.dir = where;
  auto client = remote ? prefixd::Connect(where) : prefixd::Open(options);
  if (!client.ok()) {
    std::fprintf(stderr, "%s\n", client.error().ToString().c_str());
    return 1;
  }
  prefixd::ListSpec list;
  do {
    auto page = (*client)->ListPrefixes(list);
    if (!page.ok()) {
      std::fprintf(stderr, "%s\n", page.error().ToString().c_str());
      return 1;
    }
    for (const prefixd::PrefixSummary& p : page->prefixes) {
      std::printf("%s  %u tokens of %s  %s\n", p.id.c_str(), p.n_tokens, p.model.c_str(),
                  p.label.c_str());
    }
    list.after = page->next;
  } while (!list.after.empty());
}
