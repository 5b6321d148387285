// Holds failures of the interface on every kind of client against those of an embedded store: code
// and message must be the same.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "tests/client_lib/client_scenario.h"

namespace prefixd::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// Ids of sessions, puts and prefixes differ from store to store.
inline std::string WithoutIds(const std::string& message) {
  static const std::regex ids("[0-9a-f]{32}|session [0-9]+");
  return std::regex_replace(message, ids, "ID");
}

template <typename T>
Status StatusOf(const Result<T>& result) {
  return result.ok() ? Status() : Status(result.error());
}

class ClientRefusals : public ClientScenario {
 protected:
  struct Case {
    std::string name;
    Code code;
    std::function<Status(Store&, Session&)> call;
  };

  // Every call fails with its code, and with the same message on the client and on the reference;
  // of a cancelled one, client and daemon may both be the first to say so.
  void ExpectRefused(const std::vector<Case>& cases, Session& session, Session& reference) {
    for (const Case& c : cases) {
      SCOPED_TRACE(c.name);
      const Status mine = c.call(*client_, session), theirs = c.call(*reference_, reference);
      ASSERT_FALSE(theirs.ok());
      EXPECT_EQ(theirs.error().code, c.code) << theirs.error().message;
      ASSERT_FALSE(mine.ok()) << theirs.error().message;
      EXPECT_EQ(mine.error().code, c.code) << mine.error().message;
      if (c.code == Code::kCancelled) continue;
      EXPECT_EQ(WithoutIds(mine.error().message), WithoutIds(theirs.error().message));
    }
  }
  void ExpectRefused(const std::vector<Case>& cases) {
    Put(*client_);
    const auto session = Attach(*client_), reference = Attach(*reference_);
    ASSERT_TRUE(session && reference);
    ExpectRefused(cases, *session, *reference);
  }

  std::string Id(Store& store) const {
    const auto match = store.Match({.model = prompt_.model.name, .tokens = prompt_.tokens});
    return match.ok() ? match->prefix : "";
  }

  std::vector<float> Query(float odd = 0.5f) const {
    std::vector<float> q = Queries(1, 3);
    q[5] = odd;
    return q;
  }
  Status Step(Session& s, uint32_t layer, size_t q, size_t y, size_t lse, float odd = 0.5f) const {
    std::vector<float> query = Query(odd), out(y), out_lse(lse);
    query.resize(q);
    return s.Step(layer, query, out, out_lse, nullptr);
  }
  Status Exact(Session& s, uint32_t layer, uint32_t n, size_t queries, float odd = 0.5f) const {
    std::vector<float> q = Queries(uint32_t(queries), 3), y(queries * kQHeads * kDim);
    std::vector<float> lse(queries * kQHeads);
    q.back() = odd;
    return s.AttendExact(layer, n, q, y, lse);
  }
  Status Rows(Session& s, uint32_t layer, uint32_t head, std::vector<uint32_t> ids,
              size_t extra = 0) const {
    std::vector<std::byte> out(ids.size() * prompt_.model.geometry.row(0).bytes() + extra);
    return s.ReadRows(layer, head, ids, out);
  }
  Status Range(Session& s, uint32_t layer, uint32_t head, TokenRange range, size_t rows) const {
    std::vector<std::byte> out(rows * prompt_.model.geometry.row(0).bytes());
    return s.ReadRange(layer, head, range, out);
  }
  Status Layer(Session& s, LayerSlice slice, size_t k_rows, size_t v_rows) const {
    std::vector<std::byte> k(k_rows * kDim * 2), v(v_rows * kDim * 2);
    return s.ReadLayer(slice, k, v);
  }
  Status Ids(Session& s, TokenRange range, size_t n) const {
    std::vector<uint32_t> out(n);
    return s.ReadTokens(range, out);
  }
  Status Select(Session& s, uint32_t layer, uint32_t head, size_t n, float odd = 0.5f) const {
    std::vector<float> q(n, 0.25f);
    q.back() = odd;
    return StatusOf(s.Select(layer, head, q, 8));
  }

  static constexpr size_t kQ = kQHeads * kDim, kY = kQ, kLse = kQHeads;
};

}  // namespace prefixd::testing
