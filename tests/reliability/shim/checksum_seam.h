// Switches the store's page, table and blob checksums off, for negative controls. XXH3 comes from a
// shared library; the test executable defines the two functions the store calls and passes them on,
// or answers a constant. The product has no such switch.
#pragma once

namespace prefixd::storage::reliability {

// Applies to the whole process, from now on.
void SwitchChecksumsOff();

}  // namespace prefixd::storage::reliability
