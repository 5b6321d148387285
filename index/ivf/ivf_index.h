// Loading of one kind of index, for LoadIndex. Internal to index/.
#pragma once

#include <memory>

#include "index/search/envelope.h"
#include "index/search/key_index.h"
#include "prefixd/result.h"

namespace prefixd::index {

Result<std::unique_ptr<KeyIndex>> LoadIvfIndex(const OpenedEnvelope& opened);

}  // namespace prefixd::index
