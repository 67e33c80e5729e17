// The check of layouts: it holds for every layout and dtype, of whole models and of their first layers, and what it
// allows is no more than what would hide an error.
#include "parlat/bench/layout_check.h"

#include <gtest/gtest.h>

#include "parlat/tensor/compare.h"
#include "tests/decode/small_model.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

LayoutCheck check(const SavedModel& saved, int64_t layers, const LayoutSpec& layout, at::ScalarType dtype) {
  ModelConfig config = saved.config;
  config.n_layers = layers;
  LayoutCheck result;
  run_ranks(2, [&](Communicator& comm) {
    const LayoutCheck mine = check_layout({.directory = saved.folder.path(), .slices = {}, .seed = 1}, config, layout,
                                          dtype, /*tokens=*/70, comm);
    if (comm.rank() == 0) result = mine;
  });
  return result;
}

TEST(CheckLayout, HoldsAndAllowsLittleMoreThanRoundingGives) {
  SavedModel saved;
  SliceFile slices{.model = latent_fingerprint(saved.folder.path()), .transform = "test", .layers = {}};
  for (int64_t layer = 0; layer < saved.config.n_layers; ++layer) {
    slices.layers.push_back({plain_slice(16, 2, 0), plain_slice(16, 2, 1)});
  }
  save_slices(saved.folder / slice_file_name(2), slices);
  using enum DecodeLayout;
  for (const int64_t layers : {1, 2}) {
    for (const LayoutSpec& layout : {LayoutSpec{kMla, 1}, {kGla, 2}, {kTpla, 2}, {kDcp, 1}, {kTplaDcp, 2}}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        SCOPED_TRACE(fmt::format("{}, {}, {} layers", name(layout.layout), name(dtype), layers));
        const LayoutCheck result = check(saved, layers, layout, dtype);
        EXPECT_TRUE(result.ok) << result.max_error << " against " << result.tolerance;
        // Allowed is kSafety times what rounding did elsewhere; in fp32, times a bound of it.
        EXPECT_GT(result.max_error, result.tolerance / (dtype == at::kBFloat16 ? 3 * Tolerance::kSafety : 40));
      }
    }
  }
}

}  // namespace
}  // namespace parlat
