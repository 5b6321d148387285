#include "demo/document.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <set>

namespace prefixd::demo {
namespace {

constexpr size_t kMinPromptBytes = 256;

// Returns a pronounceable word of three syllables; the model never saw a list of them.
std::string RandomWord(std::mt19937_64& rng) {
  constexpr std::string_view kConsonants = "bdfgklmnprstvz";
  constexpr std::string_view kVowels = "aeiou";
  std::string word;
  for (int syllable = 0; syllable < 3; ++syllable) {
    word += kConsonants[rng() % kConsonants.size()];
    word += kVowels[rng() % kVowels.size()];
  }
  return word;
}

Result<std::string> ReadFile(const std::filesystem::path& path) {
  std::error_code ec;
  if (std::filesystem::is_directory(path, ec)) {
    return InvalidArgument("document '" + path.string() + "' is a directory; name a text file");
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    return Error{Code::kNotFound, "cannot read document '" + path.string() +
                                      "': " + std::strerror(errno) + "; name a text file"};
  }
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// Returns the first position at or after `from` that starts a line; text.size() if there is none.
size_t NextLineStart(const std::string& text, size_t from) {
  if (from == 0) return 0;
  const size_t newline = text.find('\n', from - 1);
  return newline == std::string::npos ? text.size() : newline + 1;
}

// Moves a cut back so that it splits no UTF-8 sequence, because JSON files accept only whole ones.
size_t CharacterStart(const std::string& text, size_t at) {
  while (at > 0 && at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

}  // namespace

Status CheckUtf8(const std::string& text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  for (size_t i = 0; i < text.size();) {
    const unsigned char lead = byte(i);
    size_t extra = 0;
    uint32_t code = lead, least = 0;
    if (lead >= 0xF0 && lead < 0xF8) {
      extra = 3, code = lead & 0x07u, least = 0x10000;
    } else if (lead >= 0xE0 && lead < 0xF0) {
      extra = 2, code = lead & 0x0Fu, least = 0x800;
    } else if (lead >= 0xC0 && lead < 0xE0) {
      extra = 1, code = lead & 0x1Fu, least = 0x80;
    }
    bool good = lead < 0x80 || extra > 0;
    for (size_t j = 1; good && j <= extra; ++j) {
      good = i + j < text.size() && (byte(i + j) & 0xC0) == 0x80;
      if (good) code = (code << 6) | (byte(i + j) & 0x3Fu);
    }
    const bool surrogate = code >= 0xD800 && code < 0xE000;
    if (!good || (extra > 0 && (code < least || code > 0x10FFFF || surrogate))) {
      return InvalidArgument("not UTF-8 text: byte " + std::to_string(i) +
                             " starts no valid character; convert the file first (iconv -t UTF-8)");
    }
    i += extra + 1;
  }
  return {};
}

Result<Document> LoadDocument(const DocumentOptions& options) {
  PREFIXD_ASSIGN(const std::string text, ReadFile(options.file));
  if (Status utf8 = CheckUtf8(text); !utf8.ok()) {
    return InvalidArgument("document '" + options.file.string() + "': " + utf8.error().message);
  }

  std::mt19937_64 rng(options.seed);
  std::vector<Fact> facts;
  std::set<std::string> words;
  size_t planted_bytes = 0;
  while (facts.size() < options.facts) {
    Fact fact{RandomWord(rng), std::to_string(10000 + rng() % 90000)};
    if (!words.insert(fact.word).second || text.find(fact.word) != std::string::npos) continue;
    planted_bytes += fact.Line().size() + 1;  // plus a newline where it splits a line
    facts.push_back(std::move(fact));
  }

  const size_t need = kMinPromptBytes + planted_bytes + options.continuation_tokens;
  if (options.prompt_tokens < kMinPromptBytes + planted_bytes || text.size() < need) {
    return InvalidArgument("document '" + options.file.string() + "' has " +
                           std::to_string(text.size()) + " bytes; " + std::to_string(need) +
                           " are needed for " + std::to_string(options.facts) +
                           " facts and a continuation (choose a longer text or fewer facts)");
  }
  const size_t text_bytes =
      CharacterStart(text, std::min<size_t>(options.prompt_tokens - planted_bytes,
                                            text.size() - options.continuation_tokens));

  Document document;
  size_t copied = 0;
  for (size_t i = 0; i < facts.size(); ++i) {
    // Facts are spread evenly; the first keeps some distance from the start and the last from the
    // end.
    const size_t target = (2 * i + 1) * text_bytes / (2 * facts.size());
    size_t at = NextLineStart(text, target);
    if (at > text_bytes) at = CharacterStart(text, target);
    at = std::max(at, copied);
    document.prompt += text.substr(copied, at - copied);
    if (!document.prompt.empty() && document.prompt.back() != '\n') document.prompt += '\n';
    copied = at;
    facts[i].position = static_cast<uint32_t>(document.prompt.size());
    document.prompt += facts[i].Line();
  }
  document.prompt += text.substr(copied, text_bytes - copied);
  document.continuation = text.substr(
      text_bytes, CharacterStart(text, text_bytes + options.continuation_tokens) - text_bytes);
  document.facts = std::move(facts);
  return document;
}

}  // namespace prefixd::demo
