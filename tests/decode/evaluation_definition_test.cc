// What evaluate() sums against sums over the definition's logits in fp64, number by number.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "parlat/decode/evaluate.h"
#include "parlat/decode/sliced_oracle.h"
#include "parlat/tensor/compare.h"
#include "parlat/tensor/fill.h"
#include "tests/decode/small_model.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

// ln p of one row, its largest entry's place.
struct Predicted {
  std::vector<double> log_p;
  int64_t best = 0;
  double max_logit = 0;
  explicit Predicted(const Tensor& logits_V) {
    const double* x = logits_V.const_data_ptr<double>();
    log_p.assign(x, x + logits_V.numel());
    best = std::max_element(log_p.begin(), log_p.end()) - log_p.begin();
    double sum = 0;
    for (double& value : log_p) {
      max_logit = std::max(max_logit, std::abs(value));
      sum += std::exp(value);
    }
    for (double& value : log_p) value -= std::log(sum);
  }
};

double divergence(const Predicted& from, const Predicted& to) {
  double sum = 0;
  for (size_t i = 0; i < from.log_p.size(); ++i) sum += std::exp(from.log_p[i]) * (from.log_p[i] - to.log_p[i]);
  return sum;
}

TEST(Evaluation, SumsWhatTheDefinitionsLogitsSay) {
  constexpr int64_t kWindow = 20, kFrom = 4;
  const SavedModel saved;
  const Tensor text = seeded_integers({5 * kWindow}, 61, 2, "text");
  const auto windows =
      text_windows({text.const_data_ptr<int64_t>(), text.const_data_ptr<int64_t>() + text.numel()}, kWindow, "text");
  const std::vector<SliceMaps> halves = {plain_slice(16, 2, 0), plain_slice(16, 2, 1)};
  // Logits are off by delta at most, logarithms of probabilities by twice that; a divergence weighs differences of two.
  const double relative = Tolerance::rounding(at::kFloat, /*terms=*/80, /*depth=*/16).relative_to_norm;
  Evaluation want;
  double whole_loss = 0;
  double reversed = 0, loss_bound = 0, kl_bound = 0;
  for (const std::vector<int64_t>& window : windows) {
    const Tensor whole = saved.logits(LocalAttention(), window);
    const Tensor sliced = saved.logits(SlicedOracle(std::vector(saved.config.n_layers, halves), false), window);
    for (int64_t i = kFrom; i < kWindow; ++i) {
      const Predicted r(whole[i - 1].contiguous()), p(sliced[i - 1].contiguous());
      double widest = 0;
      for (size_t v = 0; v < p.log_p.size(); ++v) widest = std::max(widest, std::abs(r.log_p[v] - p.log_p[v]));
      const double delta = relative * std::max(r.max_logit, p.max_logit);
      loss_bound += 2 * delta;
      kl_bound += 2 * delta * (2 + widest);
      want.add({.tokens = 1,
                .loss = -p.log_p[window[i]],
                .correct = p.best == window[i],
                .kl = divergence(r, p),
                .agreed = p.best == r.best});
      reversed += divergence(p, r);
      whole_loss -= r.log_p[window[i]];
    }
  }
  run_ranks(2, [&](Communicator& comm) {
    const auto decoder = [&](DecodeLayout layout, int64_t groups) {
      return Decoder(load_model_shard({.directory = saved.folder.path(), .slices = {}, .seed = 1}, saved.config,
                                      {layout, groups}, comm.size(), comm.rank(), at::kFloat),
                     comm, {.cache_tokens = 256, .cache_dtype = at::kFloat, .slice_norm = false});
    };
    Decoder mla = decoder(DecodeLayout::kMla, 1), tpla = decoder(DecodeLayout::kTpla, 2);
    for (const int64_t chunk : {1, 3, 512}) {
      const Evaluation got = evaluate({&tpla}, &mla, windows, kFrom, {.chunk = chunk}, [](int64_t) {})[0];
      EXPECT_EQ(got.tokens, want.tokens);
      EXPECT_NEAR(got.loss, want.loss, loss_bound);
      EXPECT_NEAR(got.perplexity(), std::exp(want.loss / static_cast<double>(want.tokens)), 1e-3 * got.perplexity());
      EXPECT_NEAR(got.kl, want.kl, kl_bound);
      EXPECT_GT(std::abs(got.kl - reversed), 10 * kl_bound);
      EXPECT_EQ(got.correct, want.correct);
      EXPECT_EQ(got.agreed, want.agreed);
    }
    // Prompts in chunks too: what is exact from the first token to the last, and what is exact either way.
    for (const auto& [decoder, prompt] : {std::pair{&tpla, kWindow - 1}, {&mla, int64_t{7}}}) {
      const EvaluationOptions options{.prefill = PrefillMode::kExact, .prompt = prompt, .chunk = 3};
      const Evaluation got = evaluate({decoder}, nullptr, windows, kFrom, options, [](int64_t) {})[0];
      EXPECT_EQ(got.tokens, want.tokens);
      EXPECT_NEAR(got.loss, whole_loss, loss_bound);
    }
    EXPECT_GT(std::abs(want.loss - whole_loss), 10 * loss_bound);
    EXPECT_GT(want.agreed, 0);
    EXPECT_LT(want.agreed, want.tokens);
    EXPECT_GT(want.correct, 0);
  });
}

}  // namespace
}  // namespace parlat
