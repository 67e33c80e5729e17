// What a sequence really takes of each rank's cache, at DeepSeek-V3's latent widths.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <set>
#include <vector>

#include "parlat/base/error.h"
#include "parlat/base/units.h"
#include "parlat/decode/cache_size.h"
#include "parlat/decode/decoder.h"
#include "tests/decode/small_model.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ModelConfig v3_latents() {
  ModelConfig config = small_decode_model();
  config.mla.dims.d_latent = 512;
  config.mla.dims.d_rope = 64;
  config.max_positions = 8192;
  return config;
}

// Elements a token, layer and rank: pages in use times their size, over the tokens of one long sequence.
double measured_elements(const LayoutSpec& layout, int ranks) {
  constexpr int64_t kTokens = 8192;  // whole pages on every rank
  const ModelConfig config = v3_latents();
  double elements = 0;
  run_ranks(ranks, [&](Communicator& comm) {
    Decoder decoder(load_model_shard({}, config, layout, ranks, comm.rank(), at::kFloat), comm,
                    {.cache_tokens = kTokens, .cache_dtype = at::kBFloat16, .slice_norm = false});
    decoder.add_sequence(kTokens);
    const LatentCache& cache = decoder.cache();
    const int64_t bytes = (cache.pages() - cache.free_pages()) * kPageTokens * cache.bytes_per_row();
    const double mine = static_cast<double>(bytes) / (kTokens * config.n_layers * 2);
    EXPECT_DOUBLE_EQ(mine * static_cast<double>(config.n_layers) * 2, decoder.cache_bytes_per_token());
    const double most = comm.max_over_ranks(mine, "elements");
    if (comm.rank() == 0) elements = most;
  });
  EXPECT_EQ(cache_elements_per_token(config.mla.dims, layout, ranks), elements);  // as predicted
  return elements;
}

TEST(Cache, HoldsWhatEachLayoutPromises) {
  using enum DecodeLayout;
  EXPECT_EQ(measured_elements({kMla, 1}, 2), 576);
  EXPECT_EQ(measured_elements({kGla, 2}, 2), 320);
  EXPECT_EQ(measured_elements({kTpla, 2}, 2), 320);
  EXPECT_EQ(measured_elements({kTpla, 4}, 4), 192);
  EXPECT_EQ(measured_elements({kTpla, 2}, 8), 320);
  EXPECT_EQ(measured_elements({kDcp, 1}, 8), 72);
  EXPECT_EQ(measured_elements({kTplaDcp, 2}, 16), 40);
}

TEST(Cache, RefusesWhatTheMachineCannotHold) {
  constexpr int64_t kMany = int64_t{1} << 40;
  const auto refusal = [](const std::function<void()>& asked) -> std::string {
    try {
      asked();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  run_ranks(2, [&](Communicator& comm) {
    // Both ranks' caches of both layers, 320 columns in bf16.
    EXPECT_THAT(refusal([&] {
                  require_cache_memory(v3_latents(), {DecodeLayout::kTpla, 2}, kMany, at::kBFloat16, comm);
                }),
                AllOf(HasSubstr("this machine's memory of "),
                      HasSubstr(format_bytes(static_cast<double>(kMany) * 2 * 2 * 320 * 2))));
    EXPECT_NO_THROW(require_cache_memory(v3_latents(), {DecodeLayout::kTpla, 2}, 1024, at::kBFloat16, comm));
  });
  // Beyond any address space: the allocator itself refuses.
  EXPECT_THAT(refusal([] {
                const LatentCache huge({.n_layers = 1, .n_pages = 1 << 24, .widths = {1 << 20}, .dtype = at::kFloat});
              }),
              HasSubstr("expected memory for 1073741824 rows of 1048576"));
}

TEST(Cache, RandomPagesDifferInAndBetweenLayers) {
  LatentCache cache({.n_layers = 2, .n_pages = 600, .widths = {9, 9}, .dtype = at::kBFloat16});
  cache.fill_random(3);
  const int64_t slot = cache.add(600 * kPageTokens);
  std::set<std::vector<double>> softmaxes;  // what attention sees of a page: sums over its rows, in any order
  for (int64_t layer = 0; layer < 2; ++layer) {
    const PagedLatents all = cache.view(layer, {slot}, {600 * kPageTokens});
    const Tensor pages = all.rows_nd.to(at::kDouble).view({600, kPageTokens, 9});
    const Tensor seen = at::cat({pages.sum(1), pages.square().sum(1)}, 1).contiguous();
    for (int64_t page = 0; page < 600; ++page) {
      const double* const row = seen.const_data_ptr<double>() + page * seen.size(1);
      softmaxes.emplace(row, row + seen.size(1));
    }
  }
  EXPECT_EQ(softmaxes.size(), 2 * std::min<int64_t>(600, 9 * kPageTokens));  // as many windows as elements
}

TEST(Cache, SaysWhenThereIsNoRoomAndTakesPagesBack) {
  LatentCache cache({.n_layers = 1, .n_pages = 3, .widths = {8}, .dtype = at::kFloat});
  const int64_t a = cache.add(65), b = cache.add(64);
  EXPECT_EQ(cache.free_pages(), 0);
  EXPECT_THROW(cache.add(1), ConfigError);
  const int64_t none = cache.add(0);  // a sequence of which nothing lies here
  EXPECT_NE(none, a);
  cache.release(a);
  EXPECT_EQ(cache.free_pages(), 2);
  EXPECT_EQ(cache.add(128), a);
  cache.release(b);
  EXPECT_EQ(cache.free_pages(), 1);
}

}  // namespace
}  // namespace parlat
