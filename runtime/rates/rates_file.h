// Keeps measured rates in the store's directory, for the process that opens it next. They are a
// help, not data: what cannot be read or written is left out.
//
// Thread-safety: one thread at a time per directory.
#pragma once

#include <filesystem>

#include "prefixd/result.h"
#include "runtime/rates/measured_rates.h"

namespace prefixd {

void LoadRates(const std::filesystem::path& store_dir, MeasuredRates& rates);
// Does nothing where nothing has changed.
Status SaveRates(const std::filesystem::path& store_dir, MeasuredRates& rates);

}  // namespace prefixd
