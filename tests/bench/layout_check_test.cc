// The check of layouts: it holds for every layout and dtype, of whole models and of their first layers, and what it
// allows is no more than what would hide an error: a rank's part that is wrong in one map is refused.
#include "parlat/bench/layout_check.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>

#include "parlat/tensor/compare.h"
#include "tests/decode/small_model.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

const std::vector<LayoutSpec>& all_layouts() {
  using enum DecodeLayout;
  static const std::vector<LayoutSpec> layouts = {{kMla, 1}, {kGla, 2}, {kTpla, 2}, {kDcp, 1}, {kTplaDcp, 2}};
  return layouts;
}

LayoutCase case_of(const SavedModel& saved, const LayoutSpec& layout, at::ScalarType dtype) {
  return {.source = {.directory = saved.folder.path(), .slices = {}, .seed = 1},
          .model = saved.config,
          .layout = layout,
          .dtype = dtype,
          .cache_dtype = dtype};
}

// On two ranks, after `damage` of rank 1's shard.
LayoutCheck check(const LayoutCase& layout_case, const std::function<void(ModelShard&)>& damage = {}) {
  const LayoutDefinition definition = define_layout(layout_case);
  LayoutCheck result;
  run_ranks(2, [&](Communicator& comm) {
    ModelShard shard = load_model_shard(layout_case.source, layout_case.model, layout_case.layout, comm.size(),
                                        comm.rank(), layout_case.dtype);
    if (damage && comm.rank() == 1) damage(shard);
    const LayoutCheck mine = check_shard(std::move(shard), layout_case, definition, comm);
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
  for (const int64_t layers : {1, 2}) {
    for (const LayoutSpec& layout : all_layouts()) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        SCOPED_TRACE(fmt::format("{}, {}, {} layers", name(layout.layout), name(dtype), layers));
        LayoutCase layout_case = case_of(saved, layout, dtype);
        layout_case.model.n_layers = layers;
        const LayoutCheck result = check(layout_case);
        EXPECT_TRUE(result.ok) << result.max_error << " against " << result.tolerance;
        // Allowed is kSafety times what rounding did elsewhere; in fp32, times a bound of it.
        EXPECT_GT(result.max_error, result.tolerance / (dtype == at::kBFloat16 ? 3 * Tolerance::kSafety : 40));
      }
    }
  }
}

TEST(CheckLayout, AllowsACacheCoarserThanTheWeightsAndTheOtherWayRound) {
  const SavedModel saved;
  for (const LayoutSpec& layout : all_layouts()) {
    for (const auto& [dtype, cache_dtype] : {std::pair{at::kFloat, at::kBFloat16}, {at::kBFloat16, at::kFloat}}) {
      SCOPED_TRACE(fmt::format("{}, {} and {}", name(layout.layout), name(dtype), name(cache_dtype)));
      LayoutCase layout_case = case_of(saved, layout, dtype);
      layout_case.cache_dtype = cache_dtype;
      const LayoutCheck result = check(layout_case);
      EXPECT_TRUE(result.ok) << result.max_error << " against " << result.tolerance;
    }
  }
}

// On ranks that wait for each other for half as long as the definition takes.
TEST(CheckLayout, NoRankWaitsForTheDefinition) {
  const SavedModel saved;
  LayoutCase layout_case = case_of(saved, {DecodeLayout::kMla, 1}, at::kFloat);
  layout_case.tokens = 1000;
  const auto begin = std::chrono::steady_clock::now();
  const LayoutDefinition definition = define_layout(layout_case);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  LayoutCheck result;
  run_local_ranks(2,
                  [&](Communicator& comm) {
                    const LayoutCheck mine = check_layout(layout_case, definition, comm);
                    if (comm.rank() == 0) result = mine;
                  },
                  /*threads=*/1, {.timeout = took / 2});
  EXPECT_TRUE(result.ok) << result.max_error << " against " << result.tolerance << ", " << took.count() << " ms";
}

// What one rank holds of the last layer, a little wrong: one head's maps, one column of its slice.
TEST(CheckLayout, RefusesADamagedMapOrSliceOfOneLayerOnOneRank) {
  const SavedModel saved;
  const std::vector<std::pair<const char*, std::function<void(AttentionShard&)>>> damages = {
      {"key map", [](AttentionShard& a) { a.key_map_hwN[0].neg_(); }},
      {"value map", [](AttentionShard& a) { a.value_map_hVw[0].neg_(); }},
      {"slice", [](AttentionShard& a) { a.store_wL[0].zero_(); }},
      {"output", [](AttentionShard& a) { a.mla.w_o.narrow(1, 0, a.mla.dims().d_v).zero_(); }}};
  for (const LayoutSpec& layout : all_layouts()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [what, damage] : damages) {
        if (what == std::string("slice") && layout.groups == 1) continue;  // stored whole, through no map
        SCOPED_TRACE(fmt::format("{}, {}, {}", name(layout.layout), name(dtype), what));
        const LayoutCheck result = check(case_of(saved, layout, dtype), [&damage = damage](ModelShard& shard) {
          damage(shard.layers.back().attention);
        });
        EXPECT_FALSE(result.ok) << result.max_error << " against " << result.tolerance;
        EXPECT_GT(result.max_error, result.tolerance);
      }
    }
  }
}

}  // namespace
}  // namespace parlat
