// Every layout at every number of ranks against its own definition in fp64: prompts at once or in pieces, tokens one by
// one, several sequences of different lengths together, NaN in every row that nobody wrote.
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/decode/decoder.h"
#include "parlat/decode/sliced_oracle.h"
#include "parlat/tensor/fill.h"
#include "tests/decode/small_model.h"
#include "tests/expect_close.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

// Two layers, each some eight products and sums of up to 80 terms after one another.
const Tolerance kTolerance = Tolerance::rounding(at::kFloat, /*terms=*/80, /*depth=*/16);

std::vector<int64_t> random_tokens(int64_t count, uint64_t seed) {
  const Tensor tokens = seeded_integers({count}, 61, seed, "tokens");
  return {tokens.const_data_ptr<int64_t>(), tokens.const_data_ptr<int64_t>() + count};
}

// Maps that give back the latent, over slices that share columns and are no columns of a rotation.
SliceFile random_slices(const ModelConfig& config, int64_t groups) {
  const int64_t d_latent = config.mla.dims.d_latent;
  SliceFile file{.model = "", .transform = "test", .layers = {}};
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    auto& slices = file.layers.emplace_back();
    for (int64_t g = 0; g < groups; ++g) {
      const auto map = [&](const char* what) {
        return seeded_normal({d_latent, d_latent / groups}, 0.3, 7, fmt::format("{} {} {}", what, layer, g));
      };
      slices.push_back({map("store"), map("key"), map("value")});
    }
  }
  return file;
}

struct Case {
  LayoutSpec layout;
  std::vector<int> ranks;
};

std::vector<Case> all_cases() {
  using enum DecodeLayout;
  return {
      {{kMla, 1}, {1, 2, 3, 4, 7, 8}}, {{kGla, 2}, {2, 4, 6, 8}}, {{kGla, 3}, {3, 6}}, {{kGla, 4}, {4, 8}},
      {{kTpla, 2}, {2, 4, 6, 8}},      {{kTpla, 4}, {4, 8}},      {{kTpla, 8}, {8}},   {{kDcp, 1}, {1, 2, 3, 4, 7, 8}},
      {{kTplaDcp, 2}, {2, 4, 6, 8}},   {{kTplaDcp, 4}, {4, 8}}};
}

// The first `prompt` tokens see all of the latent, those after them its slices.
class SlicedAfterPrompt final : public Attention {
 public:
  SlicedAfterPrompt(int64_t prompt, SlicedOracle sliced) : prompt_(prompt), sliced_(std::move(sliced)) {}
  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override {
    const Tensor exact = LocalAttention().forward(w, x_BSD, tokens), sliced = sliced_.forward(w, x_BSD, tokens);
    return at::cat({exact.slice(1, 0, prompt_), sliced.slice(1, prompt_)}, 1);
  }

 private:
  int64_t prompt_;
  SlicedOracle sliced_;
};

std::string label(const LayoutSpec& layout, int ranks) {
  return fmt::format("{} of {} groups on {} ranks", name(layout.layout), layout.groups, ranks);
}

class Layouts : public ::testing::Test {
 protected:
  // After an exact prefill of so many tokens.
  Tensor expected(const LayoutSpec& layout, const std::vector<int64_t>& tokens, int64_t prompt = 0) {
    if (layout.groups == 1) return saved_.logits(LocalAttention(), tokens);
    std::vector<std::vector<SliceMaps>> slices;
    for (int64_t layer = 0; layer < saved_.config.n_layers; ++layer) {
      auto& of_layer = slices.emplace_back();
      for (int64_t g = 0; g < layout.groups; ++g) {
        of_layer.push_back(layout.layout == DecodeLayout::kGla
                               ? plain_slice(saved_.config.mla.dims.d_latent, layout.groups, g)
                               : random_slices(saved_.config, layout.groups).layers[layer][g]);
      }
    }
    const SlicedOracle sliced(slices, layout.layout == DecodeLayout::kGla);
    return saved_.logits(SlicedAfterPrompt(prompt, sliced), tokens);
  }

  Decoder decoder(const LayoutSpec& layout, Communicator& comm, bool slice_norm = false) {
    const std::filesystem::path file = saved_.folder / slice_file_name(layout.groups);
    const bool mapped = layout.groups > 1 && layout.layout != DecodeLayout::kGla;
    if (mapped && comm.rank() == 0) save_slices(file, random_slices(saved_.config, layout.groups));
    comm.barrier("slices");
    ModelShard shard = load_model_shard(
        {.directory = saved_.folder.path(), .slices = mapped ? file : std::filesystem::path(), .seed = 1},
        saved_.config, layout, comm.size(), comm.rank(), at::kFloat);
    Decoder decoder(std::move(shard), comm,
                    {.cache_tokens = 2048, .cache_dtype = at::kFloat, .slice_norm = slice_norm});
    decoder.cache().poison();
    return decoder;
  }

  SavedModel saved_;
};

TEST(LayoutCases, HaveEveryLayout) {
  std::vector<DecodeLayout> layouts;
  for (const auto& [layout, rank_counts] : all_cases()) layouts.push_back(layout.layout);
  for (const DecodeLayout layout : all_decode_layouts()) EXPECT_THAT(layouts, Contains(layout)) << name(layout);
}

TEST_F(Layouts, TokensOneByOneAgreeWithTheDefinition) {
  const std::vector<int64_t> tokens = random_tokens(70, 1);  // more than a page
  for (const auto& [layout, rank_counts] : all_cases()) {
    const Tensor want = expected(layout, tokens);
    for (const int ranks : rank_counts) {
      SCOPED_TRACE(label(layout, ranks));
      run_ranks(ranks, [&, &layout = layout](Communicator& comm) {
        Decoder model = decoder(layout, comm);
        const int64_t slot = model.add_sequence(static_cast<int64_t>(tokens.size()));
        // Most of the first page at once, then one by one into the second.
        std::vector<TokenAt> rows;
        for (int64_t i = 0; i < 60; ++i) rows.push_back({slot, i, tokens[i]});
        std::vector<Tensor> logits = {model.logits(model.forward(rows))};
        for (int64_t i = 60; i < static_cast<int64_t>(tokens.size()); ++i) {
          logits.push_back(model.logits(model.forward({{slot, i, tokens[i]}})));
        }
        EXPECT_CLOSE(at::cat(logits), want, kTolerance);
      });
    }
  }
}

TEST_F(Layouts, SequencesOfDifferentLengthsShareAPass) {
  const std::vector<std::vector<int64_t>> texts = {random_tokens(3, 2), random_tokens(65, 3), random_tokens(1, 4)};
  for (const auto& [layout, rank_counts] : all_cases()) {
    std::vector<Tensor> want;
    for (const auto& text : texts) want.push_back(expected(layout, text));
    const int ranks = rank_counts.back();  // prompts shorter than the ranks
    SCOPED_TRACE(label(layout, ranks));
    run_ranks(ranks, [&, &layout = layout](Communicator& comm) {
      Decoder model = decoder(layout, comm);
      std::vector<TokenAt> rows;
      for (const auto& text : texts) {
        const int64_t slot = model.add_sequence(static_cast<int64_t>(text.size()));
        for (size_t i = 0; i < text.size(); ++i) rows.push_back({slot, static_cast<int64_t>(i), text[i]});
      }
      EXPECT_CLOSE(model.logits(model.forward(rows)), at::cat(want), kTolerance);
    });
  }
}

TEST_F(Layouts, ExactPrefillIsExactAndDecodingGoesOnFromIt) {
  const std::vector<int64_t> tokens = random_tokens(43, 6);
  constexpr int64_t kPrompt = 40;
  const Tensor exact = saved_.logits(LocalAttention(), tokens).slice(0, 0, kPrompt);
  for (const auto& [layout, rank_counts] : all_cases()) {
    // What comes next sees what the prefill stored.
    const Tensor want = at::cat({exact, expected(layout, tokens, kPrompt).slice(0, kPrompt)});
    for (const int ranks : rank_counts) {
      SCOPED_TRACE(label(layout, ranks));
      run_ranks(ranks, [&, &layout = layout](Communicator& comm) {
        Decoder model = decoder(layout, comm);
        Decoder::Prefill state{.slot = model.add_sequence(43), .done = 0, .latents = {}};
        std::vector<Tensor> logits;
        for (const int64_t chunk : {1, 17, 22}) {
          const auto begin = tokens.begin() + state.done;
          logits.push_back(model.logits(model.prefill(state, {begin, begin + chunk})));
        }
        for (int64_t i = kPrompt; i < 43; ++i)
          logits.push_back(model.logits(model.forward({{state.slot, i, tokens[i]}})));
        EXPECT_CLOSE(at::cat(logits), want, kTolerance);
      });
    }
  }
}

TEST_F(Layouts, SlicesByTheirOwnNormHaveAnRmsOfOneAndLeaveExactPrefillExact) {
  const std::vector<int64_t> tokens = random_tokens(40, 9);
  const Tensor exact = saved_.logits(LocalAttention(), tokens);
  const LayoutSpec layout{DecodeLayout::kTpla, 2};
  run_ranks(2, [&](Communicator& comm) {
    Decoder model = decoder(layout, comm, /*slice_norm=*/true);
    Decoder::Prefill state{.slot = model.add_sequence(40), .done = 0, .latents = {}};
    EXPECT_CLOSE(model.logits(model.prefill(state, tokens)), exact, kTolerance);
    for (int64_t layer = 0; layer < saved_.config.n_layers; ++layer) {
      const PagedLatents seen = model.cache().view(layer, {state.slot}, {40});
      const Tensor z_nw = seen.rows_nd.narrow(0, seen.pages[0][0] * kPageTokens, 40).narrow(1, 0, 8);
      // The mean square of a slice is at least some hundredths here, so that eps takes a few 1e-5 at most.
      EXPECT_THAT((z_nw.square().mean(1) - 1).abs().max().item<double>(), ::testing::Lt(1e-4));
    }
  });
}

TEST_F(Layouts, SlicesByTheirOwnNormNeedANormWithoutWeights) {
  run_ranks(1, [&](Communicator& comm) {
    ModelShard shard = load_model_shard({.directory = saved_.folder.path(), .slices = {}, .seed = 1}, saved_.config, {},
                                        1, 0, at::kFloat);
    shard.layers[1].attention.mla.kv_norm[3].mul_(1.5);
    try {
      const Decoder refused(std::move(shard), comm,
                            {.cache_tokens = 64, .cache_dtype = at::kFloat, .slice_norm = true});
      ADD_FAILURE() << "nothing was thrown";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("slice-norm: expected kv_a_layernorm of 1"));
      EXPECT_THAT(error.what(), HasSubstr("others in layer 1 of " + saved_.folder.path().string()));
    }
  });
}

TEST_F(Layouts, GlaIsThePlainCutWhateverSlicesThereAre) {
  const std::filesystem::path file = saved_.folder / slice_file_name(2);
  save_slices(file, random_slices(saved_.config, 2));
  for (const std::filesystem::path& slices : {file, std::filesystem::path()}) {
    const ModelSource source{.directory = saved_.folder.path(), .slices = slices, .seed = 1};
    EXPECT_EQ(slice_file(source, {DecodeLayout::kGla, 2}), "");
    EXPECT_EQ(slice_file(source, {DecodeLayout::kTpla, 2}), file);
    const SliceMaps maps = slice_maps(source, saved_.config, {DecodeLayout::kGla, 2}, 1)[0];
    EXPECT_TRUE(maps.store_Lw.equal(plain_slice(saved_.config.mla.dims.d_latent, 2, 1).store_Lw));
  }
}

TEST_F(Layouts, AReleasedSlotIsAsGoodAsNew) {
  const std::vector<int64_t> tokens = random_tokens(9, 8);
  const LayoutSpec layout{DecodeLayout::kTpla, 2};
  const Tensor want = expected(layout, tokens);
  run_ranks(2, [&](Communicator& comm) {
    Decoder model = decoder(layout, comm);
    const int64_t first = model.add_sequence(70);
    std::vector<TokenAt> rows;
    for (int64_t i = 0; i < 70; ++i) rows.push_back({first, i, i % 61});
    model.forward(rows);
    model.release(first);
    const int64_t again = model.add_sequence(9);
    rows.clear();
    for (int64_t i = 0; i < 9; ++i) rows.push_back({again, i, tokens[i]});
    EXPECT_CLOSE(model.logits(model.forward(rows)), want, kTolerance);
  });
}

TEST(Placement, RefusesWhatCannotBe) {
  const auto refusal = [](LayoutSpec layout, int64_t heads, int ranks) -> std::string {
    MlaDims dims = small_decode_model().mla.dims;
    dims.n_heads = heads;
    try {
      place(layout, dims, ranks, 0);
    } catch (const ConfigError& error) {
      EXPECT_FALSE(can_place(layout, dims, ranks));
      return error.what();
    }
    EXPECT_TRUE(can_place(layout, dims, ranks));
    return "nothing was thrown";
  };
  using enum DecodeLayout;
  EXPECT_THAT(refusal({kMla, 1}, 4, 8), HasSubstr("at most 4 ranks to split the 4 heads, got 8"));
  EXPECT_THAT(refusal({kTpla, 3}, 16, 8), HasSubstr("groups that divide the 8 ranks, got 3"));
  EXPECT_THAT(refusal({kDcp, 2}, 16, 8), HasSubstr("expected no groups"));
  EXPECT_THAT(refusal({kGla, 4}, 4, 8), HasSubstr("at most 1 ranks to split the 1 heads of a slice, got 2"));
  EXPECT_THAT(refusal({kGla, 2}, 5, 6), HasSubstr("at most 2 ranks to split the 2 heads of a slice, got 3"));
  EXPECT_THAT(refusal({kTpla, 17}, 16, 34), HasSubstr("at most the latent's 16 columns as groups, got 17"));
  EXPECT_EQ(refusal({kTpla, 4}, 2, 8), "nothing was thrown");
}

}  // namespace
}  // namespace parlat
