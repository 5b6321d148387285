// Says how the catalog's database is opened.
//
// Thread-safety: a free function, any thread.
#pragma once

namespace rocksdb {
struct Options;
}  // namespace rocksdb

namespace prefixd::storage {

// With a cache of kCatalogCacheBytes (catalog.h), and errors alone in the log.
rocksdb::Options CatalogDbOptions();

}  // namespace prefixd::storage
