// Describes one option: its names, its member, its bounds and its help. All code that reads or
// shows options (files, command lines, JSON, the reference page) uses a table of them
// (base/tables/runtime_options.h, daemon/settings/config.h), so that an option is declared once.
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

// A value as it was given, its bounds not yet checked.
using OptionValue =
    std::variant<bool, uint64_t, double, std::string, std::vector<double>, std::vector<std::string>,
                 std::map<std::string, uint64_t>, std::map<std::string, double>>;

// The member that holds the value. Lists and tables of double hold fractions, above 0 and up to 1;
// those of a table (shares) add up to at most 1.
using OptionPlace =
    std::variant<bool*, uint32_t*, uint64_t*, double*, std::string*, std::filesystem::path*,
                 std::vector<double>*, std::vector<EstimatorVariant>*,
                 std::map<std::string, uint64_t>*, std::vector<std::pair<std::string, double>>*>;

struct OptionUnit {
  std::string_view name;  // "MiB", "tokens"; "" where there is none
  uint64_t times = 1;     // written value x times = member: 1 MiB = 2^20 bytes
  uint64_t parts = 1;     // written value / parts = member: 5 % = 0.05
};
inline constexpr OptionUnit kMib = {"MiB", 1ull << 20};
inline constexpr OptionUnit kPercent = {"%", 1, 100};

struct OptionBounds {
  uint64_t min = 0, max = 0;  // for numbers, in the unit that people write
};

struct Option {
  std::string_view name;  // in JSON: the member's; "" where only files and command lines have it
  std::string_view key;   // in files, with its section: "store.host_tier_mib"
  std::string flag;       // on command lines, without "--"
  OptionPlace place;
  OptionUnit unit;
  OptionBounds bounds;
  std::vector<std::string_view> choices;  // for texts; empty: any text
  std::string_view help;
  bool or_auto = false;  // kByMemory or kByDisk is allowed too, shown as "auto"

  std::string_view section() const;  // "store"; "" at the top of the file
  std::string_view last() const;     // the key without its section: "host_tier_mib"
  Option WithFlag(std::string_view other) &&;
  Option OrAuto() &&;
};

Option Switch(std::string_view name, std::string_view key, bool* place, std::string_view help);
Option Number(std::string_view name, std::string_view key,
              std::variant<uint32_t*, uint64_t*, double*, std::map<std::string, uint64_t>*> place,
              OptionUnit unit, OptionBounds bounds, std::string_view help);
Option Choice(std::string_view name, std::string_view key, std::string* place,
              std::vector<std::string_view> choices, std::string_view help);
// Makes an option for a text, a path, or a type that bounds its values itself. The unit names what
// people write.
Option Plain(std::string_view name, std::string_view key, OptionPlace place, std::string_view unit,
             std::string_view help);

// The form decides unit and name of a value.
enum class OptionForm {
  kWritten,  // files and command lines: store.host_tier_mib, 512
  kMember,   // JSON and C++: host_tier_bytes, 536870912
};

OptionValue GetOption(const Option& option, OptionForm form);
// kInvalidArgument begins with `shown`, the caller's name for the option, and gives the bounds and
// the value. The value must be of the kind that GetOption returns.
Status SetOption(const Option& option, const OptionValue& value, OptionForm form,
                 std::string_view shown);
// Checks the bounds of the member's present value.
Status CheckOption(const Option& option);

// Reads the form of command lines: "17", "8GiB" (where the unit is MiB), "auto", "true",
// "0.01,0.02", "team-a=4096,team-b=0".
Status SetOptionFromText(const Option& option, std::string_view text, std::string_view shown);
std::string OptionText(const OptionValue& value);  // kByMemory and kByDisk are "auto"
// Returns kInvalidArgument for a value, shown as `given`, that is not of the option's kind.
Error WrongKind(const Option& option, OptionForm form, std::string_view shown,
                std::string_view given);
// Returns "0 to 1024 MiB", "auto | cpu | cuda", or "" when every value is allowed.
std::string OptionBoundsText(const Option& option, OptionForm form);
std::string ShortNumber(double x);  // the shortest text that reads back to the same

}  // namespace prefixd
