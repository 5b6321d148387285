#include "tests/fuzz/page.h"

namespace prefixd::fuzz {

void RunOne(FuzzedDataProvider& in) {
  using storage::SegmentFooter;
  const uint8_t mode = Whole<uint8_t>(in) % 3;
  if (mode < 2) {
    Page page = PageOf(Rest(in));
    if (mode == 1) PutChecksumRight(page);
    CheckPage<SegmentFooter>(page);
    return;
  }
  SegmentFooter footer;
  Fill(in, footer.file);
  footer.sequence = Whole<uint64_t>(in);
  footer.total_pages = Whole<uint64_t>(in);
  footer.table_checksum = Whole<uint64_t>(in);
  footer.manifest_bytes = Whole<uint64_t>(in);
  footer.sealed_unix_ms = Whole<int64_t>(in);
  Page page;
  footer.Encode(page);
  const auto back = SegmentFooter::Decode(page);
  FUZZ_EXPECT(back.ok() && *back == footer);
  CheckDamaged(in, page, CheckPage<SegmentFooter>, PutChecksumRight);
}

}  // namespace prefixd::fuzz
