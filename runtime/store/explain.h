// Says why a prompt hit or missed, in the types of the public interface.
//
// Thread-safety: free functions, any thread.
#pragma once

#include "prefixd/explain.h"
#include "prefixd/result.h"
#include "runtime/store/core.h"

namespace prefixd {

// Looks at what the spec's tenant has stored, and had, and at nothing else of any tenant.
Result<Explanation> ExplainMatch(const Core& core, const ExplainSpec& spec);

// Lists the fields in which two models' identities and geometries differ, by name.
std::vector<FieldDifference> DifferencesOf(const ModelSpec& asked, const ModelSpec& stored);

}  // namespace prefixd
