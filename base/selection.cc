#include "prefixd/selection.h"

#include <string>

namespace prefixd {

std::string_view GroupRuleName(GroupRule rule) {
  switch (rule) {
    case GroupRule::kMax:
      return "max";
    case GroupRule::kSum:
      return "sum";
    case GroupRule::kUnion:
      return "union";
  }
  return "unknown";
}

Result<GroupRule> GroupRuleFromName(std::string_view name) {
  for (const GroupRule rule : {GroupRule::kMax, GroupRule::kSum, GroupRule::kUnion}) {
    if (GroupRuleName(rule) == name) return rule;
  }
  return InvalidArgument("no rule named '" + std::string(name) +
                         "' for the heads of a group; use max, sum or union");
}

}  // namespace prefixd
