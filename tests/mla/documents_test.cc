// Packing: positions, who sees whom, and what is refused.
#include "parlat/mla/documents.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "parlat/base/error.h"

namespace parlat {
namespace {

std::vector<Range> rows(const KeyRanges& visible, int64_t b) {
  std::vector<Range> rows;
  for (int64_t s = 0; s < visible.n_queries(); ++s) rows.push_back(visible.row(b, s));
  return rows;
}

const Documents& two_sequences() {
  static const Documents documents = Documents::packed(5, {{1, 4}, {3, 2}});
  return documents;
}

TEST(Documents, PositionsRestart) {
  const at::Tensor want = at::tensor({0, 0, 1, 2, 3, 0, 1, 2, 0, 1}, at::kLong).view({2, 5});
  EXPECT_TRUE(two_sequences().positions().equal(want));
  EXPECT_TRUE(Documents::whole(2, 3).positions().equal(at::tensor({0, 1, 2, 0, 1, 2}, at::kLong).view({2, 3})));
}

TEST(Documents, CausalWithinADocument) {
  const KeyRanges visible = two_sequences().visible(/*causal=*/true);
  EXPECT_EQ(rows(visible, 0), (std::vector<Range>{{0, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}}));
  EXPECT_EQ(rows(visible, 1), (std::vector<Range>{{0, 1}, {0, 2}, {0, 3}, {3, 4}, {3, 5}}));
}

TEST(Documents, AllOfADocumentWithoutCausalMask) {
  const KeyRanges visible = two_sequences().visible(/*causal=*/false);
  EXPECT_EQ(rows(visible, 1), (std::vector<Range>{{0, 3}, {0, 3}, {0, 3}, {3, 5}, {3, 5}}));
}

TEST(Documents, HullSpansTheDocumentsOfItsQueries) {
  const KeyRanges visible = two_sequences().visible(/*causal=*/true);
  EXPECT_EQ(visible.hull(1, {3, 5}), (Range{3, 5}));
  EXPECT_EQ(visible.hull(1, {2, 4}), (Range{0, 4}));
  EXPECT_EQ(visible.hull(1, {2, 2}), (Range{0, 0}));
}

TEST(Documents, EmptySequence) {
  EXPECT_EQ(Documents::whole(2, 0).positions().sizes(), (std::vector<int64_t>{2, 0}));
  EXPECT_EQ(Documents::whole(2, 0).visible(true).n_queries(), 0);
}

std::string refusal(int64_t sequence, const std::vector<std::vector<int64_t>>& lengths) {
  try {
    Documents::packed(sequence, lengths);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Documents, LengthsMustAddUp) {
  EXPECT_EQ(refusal(5, {{5}, {2, 4}}), "documents of sequence 1: expected lengths that add up to 5, got 6");
  EXPECT_EQ(refusal(5, {{}}), "documents of sequence 0: expected lengths that add up to 5, got 0");
  EXPECT_EQ(refusal(5, {{5, 0}}), "documents of sequence 0: expected lengths of at least 1, got 0");
}

}  // namespace
}  // namespace parlat
