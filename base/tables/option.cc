#include "base/tables/option.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "prefixd/options.h"

namespace prefixd {
namespace {

constexpr size_t kMaxFractions = 16;
constexpr std::string_view kAuto = "auto";  // kByMemory, kByDisk
static_assert(kByMemory == kByDisk);
using Shares = std::vector<std::pair<std::string, double>>;

template <typename... F>
struct Overloaded : F... {
  using F::operator()...;
};
// clang deduces an aggregate's arguments from version 17 on.
template <typename... F>
Overloaded(F...) -> Overloaded<F...>;

std::string Quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string_view WithoutBlanks(std::string_view s) {
  const size_t begin = s.find_first_not_of(" \t"), end = s.find_last_not_of(" \t");
  return begin == s.npos ? std::string_view() : s.substr(begin, end - begin + 1);
}

// Checks a value of one option and stores it in the member.
struct Setter {
  const Option& option;
  const OptionForm form;
  const std::string_view shown;

  Error Bad(const std::string& why) const {
    return InvalidArgument(std::string(shown) + " " + why);
  }
  bool written() const { return form == OptionForm::kWritten; }
  Error OutOfBounds(const std::string& given, const std::string& of = "") const {
    return Bad(of + "must be from " + OptionBoundsText(option, form) + ", not " + given);
  }

  Result<uint64_t> Whole(uint64_t n, const std::string& of = "") const {
    if (option.or_auto && n == kByMemory) return n;
    const uint64_t one = written() ? 1 : option.unit.times;
    if (n < option.bounds.min * one || n > option.bounds.max * one) {
      return OutOfBounds(OptionText(n), of);
    }
    return n * (option.unit.times / one);
  }

  Status Put(bool* place, bool value) const {
    *place = value;
    return {};
  }
  template <std::unsigned_integral T>
  Status Put(T* place, uint64_t value) const {
    PREFIXD_ASSIGN(const uint64_t n, Whole(value));
    if (n > std::numeric_limits<T>::max()) return OutOfBounds(std::to_string(value));
    *place = static_cast<T>(n);
    return {};
  }
  Status Put(double* place, double value) const {
    const double parts = double(option.unit.parts);
    const double given = written() ? value : value * parts;
    if (!(given >= double(option.bounds.min) && given <= double(option.bounds.max))) {
      return OutOfBounds(ShortNumber(value));
    }
    *place = written() ? value / parts : value;
    return {};
  }
  template <typename Text>
  requires std::same_as<Text, std::string> || std::same_as<Text, std::filesystem::path> Status
  Put(Text* place, const std::string& value)
  const {
    if (!option.choices.empty() && std::ranges::find(option.choices, value) == option.choices.end())
      return Bad("must be one of " + OptionBoundsText(option, form) + ", not " + Quoted(value));
    *place = value;
    return {};
  }
  Status Put(std::vector<double>* place, const std::vector<double>& value) const {
    for (const double x : value) {
      if (!(x > 0 && x <= 1)) {
        return Bad("must hold fractions above 0 and up to 1, not " + ShortNumber(x));
      }
    }
    if (value.empty() || value.size() > kMaxFractions) {
      return Bad("must hold 1 to " + std::to_string(kMaxFractions) + " fractions, not " +
                 std::to_string(value.size()));
    }
    *place = value;
    return {};
  }
  Status Put(std::vector<EstimatorVariant>* place, const std::vector<std::string>& value) const {
    auto parsed = ParseVariants(OptionText(value));
    if (!parsed.ok()) {
      return Bad("of " + Quoted(OptionText(value)) + " is wrong: " + parsed.error().message);
    }
    *place = *std::move(parsed);
    return {};
  }
  Status Put(std::map<std::string, uint64_t>* place,
             const std::map<std::string, uint64_t>& value) const {
    std::map<std::string, uint64_t> numbers;
    for (const auto& [name, number] : value) {
      PREFIXD_ASSIGN(numbers[name], Whole(number, "of " + Quoted(name) + " "));
    }
    *place = std::move(numbers);
    return {};
  }
  Status Put(Shares* place, const std::map<std::string, double>& value) const {
    double sum = 0;
    for (const auto& [name, x] : value) {
      if (!(x > 0 && x <= 1)) {
        return Bad("of " + Quoted(name) + " must be above 0 and up to 1, not " + ShortNumber(x));
      }
      sum += x;
    }
    if (sum > 1 + 1e-9) return Bad("add up to " + ShortNumber(sum) + "; they may be 1 at most");
    place->assign(value.begin(), value.end());
    return {};
  }
};

// ---- from text ------------------------------------------------------------------------------

template <typename F>
bool EachPart(std::string_view text, F&& take) {
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    if (!take(text.substr(0, comma))) return false;
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return true;
}

bool Parse(std::string_view text, bool* out) {
  *out = text == "true" || text == "on" || text == "1";
  return *out || text == "false" || text == "off" || text == "0";
}
template <typename T>
requires std::same_as<T, uint64_t> || std::same_as<T, double>
bool Parse(std::string_view text, T* out) {
  text = WithoutBlanks(text);
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return ec == std::errc{} && end == text.data() + text.size();
}
bool Parse(std::string_view text, std::string* out) {
  *out = text;
  return true;
}
template <typename T>
bool Parse(std::string_view text, std::vector<T>* out) {
  out->clear();
  return EachPart(text, [&](std::string_view part) {
    return Parse(WithoutBlanks(part), &out->emplace_back());
  });
}
template <typename T>
bool Parse(std::string_view text, std::map<std::string, T>* out) {
  out->clear();
  return EachPart(text, [&](std::string_view part) {
    const size_t equals = part.rfind('=');
    if (equals == part.npos) return false;
    const auto [at, is_new] = out->try_emplace(std::string(WithoutBlanks(part.substr(0, equals))));
    return is_new && Parse(part.substr(equals + 1), &at->second);
  });
}

// Reads "8GiB" or "auto" where the option is written in MiB.
std::optional<uint64_t> WithSuffix(const Option& option, std::string_view text) {
  if (!std::holds_alternative<uint64_t*>(option.place) || option.unit.name != kMib.name) return {};
  text = WithoutBlanks(text);
  if (option.or_auto && text == kAuto) return kByMemory;
  for (const auto& [suffix, mib] : {std::pair("MiB", 1u), {"GiB", 1u << 10}, {"TiB", 1u << 20}}) {
    uint64_t number = 0;
    if (!text.ends_with(suffix)) continue;
    text.remove_suffix(3);
    if (!Parse(text, &number) || number > UINT64_MAX / mib / kMib.times) return {};
    return number * mib;
  }
  return {};
}

uint64_t Shown(uint64_t n, uint64_t times) { return n == kByMemory ? n : n / times; }

// ---- to text --------------------------------------------------------------------------------

std::string Text(bool value) { return value ? "true" : "false"; }
std::string Text(uint64_t value) {
  return value == kByMemory ? std::string(kAuto) : std::to_string(value);
}
std::string Text(double value) { return ShortNumber(value); }
std::string Text(const std::string& value) { return value; }
template <typename T>
std::string Text(const std::pair<const std::string, T>& value) {
  return value.first + "=" + Text(value.second);
}
std::string Joined(const auto& list) {
  std::string text;
  for (const auto& item : list) text += (text.empty() ? "" : ",") + Text(item);
  return text;
}
template <typename T>
std::string Text(const std::vector<T>& list) {
  return Joined(list);
}
template <typename T>
std::string Text(const std::map<std::string, T>& table) {
  return Joined(table);
}

Option MakeOption(std::string_view name, std::string_view key, OptionPlace place,
                  std::string_view help) {
  Option option{.name = name, .key = key, .flag = {}, .place = place, .help = help};
  option.flag = option.last();
  std::ranges::replace(option.flag, '_', '-');
  return option;
}

}  // namespace

std::string_view Option::section() const {
  const size_t dot = key.find('.');
  return dot == key.npos ? "" : key.substr(0, dot);
}

std::string_view Option::last() const { return key.substr(key.find('.') + 1); }

Option Option::WithFlag(std::string_view other) && {
  flag = other;
  return std::move(*this);
}

Option Option::OrAuto() && {
  or_auto = true;
  return std::move(*this);
}

Option Switch(std::string_view name, std::string_view key, bool* place, std::string_view help) {
  return MakeOption(name, key, place, help);
}

Option Number(std::string_view name, std::string_view key,
              std::variant<uint32_t*, uint64_t*, double*, std::map<std::string, uint64_t>*> place,
              OptionUnit unit, OptionBounds bounds, std::string_view help) {
  Option option =
      MakeOption(name, key, std::visit([](auto* p) { return OptionPlace(p); }, place), help);
  option.unit = unit;
  option.bounds = bounds;
  return option;
}

Option Choice(std::string_view name, std::string_view key, std::string* place,
              std::vector<std::string_view> choices, std::string_view help) {
  Option option = MakeOption(name, key, place, help);
  option.choices = std::move(choices);
  return option;
}

Option Plain(std::string_view name, std::string_view key, OptionPlace place, std::string_view unit,
             std::string_view help) {
  Option option = MakeOption(name, key, place, help);
  option.unit.name = unit;
  return option;
}

OptionValue GetOption(const Option& option, OptionForm form) {
  const bool written = form == OptionForm::kWritten;
  const uint64_t times = written ? option.unit.times : 1;
  return std::visit(
      Overloaded{
          [](const bool* p) { return OptionValue(*p); },
          [&](const std::unsigned_integral auto* p) { return OptionValue(Shown(*p, times)); },
          [&](const double* p) {
            // 0.95 times 100 is not exactly 95, so the product is rounded to nine digits.
            const double shown = std::round(*p * double(option.unit.parts) * 1e9) / 1e9;
            return OptionValue(written ? shown : *p);
          },
          [](const std::string* p) { return OptionValue(*p); },
          [](const std::filesystem::path* p) { return OptionValue(p->string()); },
          [](const std::vector<double>* p) { return OptionValue(*p); },
          [](const std::vector<EstimatorVariant>* p) {
            std::vector<std::string> names;
            for (const EstimatorVariant& v : *p) names.push_back(v.Name());
            return OptionValue(std::move(names));
          },
          [&](const std::map<std::string, uint64_t>* p) {
            std::map<std::string, uint64_t> numbers = *p;
            for (auto& [name, number] : numbers) number /= times;
            return OptionValue(std::move(numbers));
          },
          [](const Shares* p) {
            return OptionValue(std::map<std::string, double>(p->begin(), p->end()));
          },
      },
      option.place);
}

Status SetOption(const Option& option, const OptionValue& value, OptionForm form,
                 std::string_view shown) {
  const Setter setter{option, form, shown};
  return std::visit(
      [&](auto* place, const auto& given) -> Status {
        using Place = std::remove_pointer_t<decltype(place)>;
        using Given = std::remove_cvref_t<decltype(given)>;
        constexpr bool kSwitch = std::is_same_v<Place, bool> == std::is_same_v<Given, bool>;
        constexpr bool kReal = std::is_same_v<Place, double> == std::is_same_v<Given, double>;
        if constexpr (kSwitch && kReal && requires { setter.Put(place, given); }) {
          return setter.Put(place, given);
        } else {
          return WrongKind(option, form, shown, Quoted(OptionText(value)));
        }
      },
      option.place, value);
}

Status CheckOption(const Option& option) {
  return SetOption(option, GetOption(option, OptionForm::kMember), OptionForm::kMember,
                   option.name.empty() ? option.key : option.name);
}

Status SetOptionFromText(const Option& option, std::string_view text, std::string_view shown) {
  OptionValue value = GetOption(option, OptionForm::kWritten);
  if (std::optional<uint64_t> sized = WithSuffix(option, text)) {
    value = *sized;
  } else if (!std::visit([&](auto& out) { return Parse(text, &out); }, value)) {
    return WrongKind(option, OptionForm::kWritten, shown, Quoted(text));
  }
  return SetOption(option, value, OptionForm::kWritten, shown);
}

std::string OptionText(const OptionValue& value) {
  return std::visit([](const auto& x) { return Text(x); }, value);
}

Error WrongKind(const Option& option, OptionForm form, std::string_view shown,
                std::string_view given) {
  static constexpr std::string_view kKinds[] = {"true or false",
                                                "a whole number",
                                                "a number",
                                                "a string",
                                                "a list of numbers",
                                                "a list of names",
                                                "a table of whole numbers by name",
                                                "a table of numbers by name"};
  static_assert(std::size(kKinds) == std::variant_size_v<OptionValue>);
  const OptionValue value = GetOption(option, form);
  const std::string bounds = OptionBoundsText(option, form);
  const bool said = bounds.empty() || std::holds_alternative<bool>(value);
  return InvalidArgument(std::string(shown) + " must be " + std::string(kKinds[value.index()]) +
                         (said ? "" : " (" + bounds + ")") + ", not " + std::string(given));
}

std::string OptionBoundsText(const Option& option, OptionForm form) {
  std::string text;
  for (const std::string_view c : option.choices)
    text += (text.empty() ? "" : ", ") + std::string(c);
  if (!text.empty()) return text;
  const auto numbers = [&](bool real) {
    const OptionUnit& unit = option.unit;
    const bool written = form == OptionForm::kWritten;
    const auto number = [&](uint64_t n) {
      if (real && !written) return ShortNumber(double(n) / double(unit.parts));
      return std::to_string(written ? n : n * unit.times);
    };
    const bool scaled = unit.times != unit.parts;
    const std::string_view name = written || !scaled ? unit.name : "";
    return number(option.bounds.min) + " to " + number(option.bounds.max) +
           (name.empty() ? "" : " " + std::string(name));
  };
  return std::visit(
      Overloaded{
          [](const bool*) { return std::string("true, false"); },
          [&](const std::unsigned_integral auto*) { return numbers(false); },
          [&](const double*) { return numbers(true); },
          [&](const std::map<std::string, uint64_t>*) { return numbers(false); },
          [](const std::vector<double>*) {
            return "1 to " + std::to_string(kMaxFractions) + " fractions above 0 and up to 1";
          },
          [](const Shares*) { return std::string("fractions above 0, together up to 1"); },
          [&](const auto*) { return std::string(option.unit.name); },
      },
      option.place);
}

std::string ShortNumber(double x) {
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), x).ptr;
  return {buffer, end};
}

}  // namespace prefixd
