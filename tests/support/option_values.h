// Makes values for tests of any option: a valid one that differs from its present value, and
// invalid ones.
#pragma once

#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "base/tables/option.h"

namespace prefixd::testing {

template <typename... F>
struct OfType : F... {
  using F::operator()...;
};
// clang deduces an aggregate's arguments from version 17 on.
template <typename... F>
OfType(F...) -> OfType<F...>;

// Returns a value within the bounds that differs from the option's present one.
inline OptionValue OtherValue(const Option& option, OptionForm form) {
  OptionValue value = GetOption(option, form);
  const uint64_t times = form == OptionForm::kWritten ? 1 : option.unit.times;
  const uint64_t min = option.bounds.min * times, max = option.bounds.max * times;
  std::visit(OfType{
                 [](bool& x) { x = !x; },
                 [&](uint64_t& x) { x = x == max ? min : max; },
                 [&](double& x) { x = x == double(min) ? double(max) : double(min); },
                 [&](std::string& x) {
                   for (const std::string_view choice : option.choices) {
                     if (choice != x) return void(x = choice);
                   }
                   x = "/with \"quotes\", and \\";
                 },
                 [](std::vector<double>& x) {
                   x = {0.125, 1};
                 },
                 [](std::vector<std::string>& x) {
                   x = {"none", "moment/r4"};
                 },
                 [&](std::map<std::string, uint64_t>& x) {
                   x = {{"team a", min}, {"b=\"c\"", max}};
                 },
                 [](std::map<std::string, double>& x) {
                   x = {{"team a", 0.5}, {"b=\"c\"", 0.25}};
                 },
             },
             value);
  return value;
}

// Sets the member to values out of bounds, one after another, and calls `each` for every one. The
// member has its old value afterwards. Options without bounds (any text, true or false) have no
// such values.
template <typename F>
void ForEachValueOutOfBounds(const Option& option, F&& each) {
  const uint64_t times = option.unit.times;
  const auto place = [&](auto* member, std::vector<std::remove_pointer_t<decltype(member)>> all) {
    const auto old = *member;
    for (const auto& wrong : all) *member = wrong, each();
    *member = old;
  };
  std::visit(OfType{
                 [&](std::unsigned_integral auto* member) {
                   using T = std::remove_pointer_t<decltype(member)>;
                   place(member, {static_cast<T>((option.bounds.max + 1) * times)});
                   if (option.bounds.min == 0) return;
                   place(member, {static_cast<T>((option.bounds.min - 1) * times)});
                 },
                 [](bool*) {},
                 [&](double* member) {
                   place(member, {double(option.bounds.max + 1) / double(option.unit.parts), -0.5});
                 },
                 [&](std::string* member) {
                   if (!option.choices.empty()) place(member, {"no such choice", ""});
                 },
                 [](std::filesystem::path*) {},
                 [&](std::vector<double>* member) {
                   place(member, {{}, {0.0}, {0.5, 1.5}, std::vector<double>(17, 0.5)});
                 },
                 [&](std::vector<EstimatorVariant>* member) {
                   place(member, {{}, {EstimatorKind::kNone, EstimatorKind::kAuto}});
                 },
                 [&](std::map<std::string, uint64_t>* member) {
                   place(member, {{{"a", (option.bounds.max + 1) * times}}});
                 },
                 [&](std::vector<std::pair<std::string, double>>* member) {
                   place(member, {{{"a", 1.5}}, {{"a", 0.0}}, {{"a", 0.75}, {"b", 0.5}}});
                 },
             },
             option.place);
}

inline bool HasBounds(const Option& option) {
  bool bounds = false;
  ForEachValueOutOfBounds(option, [&] { bounds = true; });
  return bounds;
}

}  // namespace prefixd::testing
