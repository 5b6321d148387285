// One option: what it is called, where its value lies, what it may be, what it means. Whatever
// takes or shows options (files, command lines, JSON, the reference page) goes through a table of
// these (base/runtime_options.h, daemon/config.h), so that an option is declared once.
//
// An option has a value in two units: the one that people write ("MiB", in files and on command
// lines) and the one of its member (bytes, in JSON and in C++).
//
// Thread-safety: plain values and free functions; an Option points into the struct it was made of.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "prefixd/estimator_variant.h"
#include "prefixd/result.h"

namespace prefixd {

// A value as it was given, before anybody has looked at its bounds.
using OptionValue =
    std::variant<bool, uint64_t, double, std::string, std::vector<double>, std::vector<std::string>,
                 std::map<std::string, uint64_t>, std::map<std::string, double>>;

// A member. Lists and tables of double hold fractions, above 0 and up to 1; those of a table
// (shares) are 1 at most together.
using OptionPlace =
    std::variant<bool*, uint32_t*, uint64_t*, double*, std::string*, std::filesystem::path*,
                 std::vector<double>*, std::vector<EstimatorVariant>*,
                 std::map<std::string, uint64_t>*, std::vector<std::pair<std::string, double>>*>;

struct OptionUnit {
  std::string_view name;  // "MiB", "tokens"; "" where there is none
  uint64_t times = 1;     // one of it is so many of the member's ...
  uint64_t parts = 1;     // ... or the member's is so many of it
};
inline constexpr OptionUnit kMib = {"MiB", 1ull << 20};
inline constexpr OptionUnit kPercent = {"%", 1, 100};

struct OptionBounds {
  uint64_t min = 0, max = 0;  // of numbers, in the unit that people write
};

struct Option {
  std::string_view name;  // in JSON: the member's; "" where only files and command lines have it
  std::string_view key;   // in files, with its section: "store.host_tier_mib"
  std::string flag;       // on command lines, without "--"
  OptionPlace place;
  OptionUnit unit;
  OptionBounds bounds;
  std::vector<std::string_view> choices;  // of texts; empty: any
  std::string_view help;

  std::string_view section() const;  // "store"; "" at the top of the file
  std::string_view last() const;     // of the key: "host_tier_mib"
  Option WithFlag(std::string_view other) &&;
};

Option Switch(std::string_view name, std::string_view key, bool* place, std::string_view help);
Option Number(std::string_view name, std::string_view key,
              std::variant<uint32_t*, uint64_t*, double*, std::map<std::string, uint64_t>*> place,
              OptionUnit unit, OptionBounds bounds, std::string_view help);
Option Choice(std::string_view name, std::string_view key, std::string* place,
              std::vector<std::string_view> choices, std::string_view help);
// Texts, paths, and what has its bounds in its type. The unit says what is to be written.
Option Plain(std::string_view name, std::string_view key, OptionPlace place, std::string_view unit,
             std::string_view help);

// Whose unit and whose name.
enum class OptionForm {
  kWritten,  // files and command lines: store.host_tier_mib, 512
  kMember,   // JSON and C++: host_tier_bytes, 536870912
};

OptionValue GetOption(const Option& option, OptionForm form);
// kInvalidArgument says what the value must be and what it is, beginning with `shown`, which is
// what the giver calls the option. The value must be of the kind that GetOption returns.
Status SetOption(const Option& option, const OptionValue& value, OptionForm form,
                 std::string_view shown);
// The bounds of a value that stands in its member already.
Status CheckOption(const Option& option);

// As it stands on a command line: "17", "true", "0.01,0.02", "team-a=4096,team-b=0".
Status SetOptionFromText(const Option& option, std::string_view text, std::string_view shown);
std::string OptionText(const OptionValue& value);
// kInvalidArgument: what was given, shown as `given`, is no value of the option's kind.
Error WrongKind(const Option& option, OptionForm form, std::string_view shown,
                std::string_view given);
// "0 to 1024 MiB", "auto | cpu | cuda"; "" where anything goes.
std::string OptionBoundsText(const Option& option, OptionForm form);
std::string ShortNumber(double x);  // the shortest text that reads back to the same

}  // namespace prefixd
