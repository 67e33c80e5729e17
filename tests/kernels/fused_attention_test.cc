// Attention that rebuilds keys and values from latents, joins parts, and what it keeps.
#include "parlat/kernels/fused_attention.h"

#include "parlat/base/error.h"
#include "parlat/kernels/block_product.h"
#include "parlat/kernels/eager_attention.h"
#include "parlat/kernels/fused_passes.h"
#include "parlat/kernels/softmax_rows.h"
#include "parlat/tensor/memory_meter.h"
#include "tests/kernels/attention_case.h"
#include "tests/kernels/forced_gemm.h"
#include "tests/thread_count.h"

namespace parlat {
namespace {

constexpr int64_t kNope = 8, kRope = 4, kValue = 6, kLatent = 10;

struct LatentCase {
  Tensor q, latent, w, grad;
  KeyRanges visible;
  std::vector<Tensor> inputs() const { return {q, latent, w}; }
};

LatentCase latent_case(const KeyRanges& visible, int64_t n_heads, at::ScalarType dtype) {
  const auto leaf = [&](at::IntArrayRef shape, double deviation, const char* name) {
    return seeded_normal(shape, deviation, kAttentionSeed, name, dtype).requires_grad_();
  };
  return {leaf({visible.batch(), visible.n_queries(), n_heads, kNope + kRope}, 1, "q"),
          leaf({visible.batch(), visible.n_keys(), kLatent + kRope}, 1, "latent"),
          leaf({n_heads * (kNope + kValue), kLatent}, 0.3, "w"),
          leaf({visible.batch(), visible.n_queries(), n_heads, kValue}, 1, "grad").detach(), visible};
}

// Keys and values of all heads written out, then the kernel that writes out the scores.
Tensor by_definition(const Tensor& q, const Tensor& latent, const Tensor& w, const KeyRanges& visible) {
  const int64_t n_heads = q.size(2);
  const Tensor kv = at::matmul(latent.narrow(2, 0, kLatent), w.t()).unflatten(2, {n_heads, kNope + kValue});
  const Tensor k_rope = latent.narrow(2, kLatent, kRope).unsqueeze(2).expand({-1, -1, n_heads, -1});
  return eager_attention(q, at::cat({kv.narrow(3, 0, kNope), k_rope}, 3), kv.narrow(3, kNope, kValue), visible, kScale);
}

AttentionGradients run(const LatentCase& c) {
  const Tensor out = fused_latent_attention(c.q, c.latent, c.w, c.visible, kScale);
  return {out.detach(), torch::autograd::grad({out}, c.inputs(), {c.grad})};
}

AttentionGradients exact(const LatentCase& c) {
  std::vector<Tensor> leaves;
  for (const Tensor& x : c.inputs()) leaves.push_back(x.detach().to(at::kDouble).requires_grad_());
  const Tensor out = by_definition(leaves[0], leaves[1], leaves[2], c.visible);
  return {out.detach(), torch::autograd::grad({out}, leaves, {c.grad.to(at::kDouble)})};
}

// As in expect_exact, and the up-projection before.
void expect_exact(const LatentCase& c) {
  const at::ScalarType dtype = c.q.scalar_type();
  const int64_t terms = std::max(c.visible.n_keys(), c.visible.n_queries()) * c.q.size(2);
  const AttentionGradients got = run(c), want = exact(c);
  EXPECT_EQ(got.out.scalar_type(), dtype);
  EXPECT_CLOSE(got.out, want.out, Tolerance::rounding(dtype, terms, 4));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(got.grads[i].scalar_type(), dtype);
    const Comparison compared = compare(got.grads[i], want.grads[i], Tolerance::rounding(dtype, terms, 6),
                                        gradient_scale(want.grads[i], dtype, true));
    EXPECT_TRUE(compared.close) << "gradient of input " << i << ": " << compared.text();
  }
}

class Fused : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Fused, Latents) { expect_exact(latent_case(causal(2, 37), 3, GetParam())); }
TEST_P(Fused, LatentsOverSeveralBlocks) { expect_exact(latent_case(causal(1, 1100), 3, GetParam())); }
TEST_P(Fused, LatentsOfPackedDocuments) { expect_exact(latent_case(packed(2, 600, true), 4, GetParam())); }
TEST_P(Fused, LatentsThatNobodySees) { expect_exact(latent_case(with_empty_rows(300, 40), 2, GetParam())); }
TEST_P(Fused, MoreLatentsThanQueries) { expect_exact(latent_case(full(2, 5, 700), 3, GetParam())); }

// Every sixteenth query of a causal sequence: rows of up to 16384 keys.
TEST_P(Fused, LatentsOfSixteenThousandTokens) {
  std::vector<Range> rows;
  for (int64_t query = 0; query < 16384; query += 16) rows.push_back({0, query + 1});
  expect_exact(latent_case(KeyRanges(1, 1024, 16384, rows), 1, GetParam()));
}

TEST_P(Fused, LatentsRepeatTheirBitsOnAnyNumberOfThreads) {
  const LatentCase c = latent_case(packed(2, 600, true), 5, GetParam());
  const auto on_threads = [&](int threads) {
    const ThreadCount count(threads);
    return run(c);
  };
  const AttentionGradients once = on_threads(1);
  for (const int threads : {1, 2, 3}) {
    const AttentionGradients again = on_threads(threads);
    EXPECT_TRUE(once.out.equal(again.out)) << threads;
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(once.grads[i].equal(again.grads[i])) << threads << " input " << i;
  }
}

// Between forward and backward: the output, and one number a query and head.
TEST_P(Fused, KeepsNoKeyNoValueNoScore) {
  constexpr int64_t kTokens = 700, kHeads = 6;
  const int64_t element = c10::elementSize(GetParam()),
                wide = c10::elementSize(GetParam() == at::kDouble ? at::kDouble : at::kFloat);
  const ThreadCount one(1);
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const LatentCase c = latent_case(causal(1, kTokens), kHeads, GetParam());
  meter.reset();
  const Tensor out = fused_latent_attention(c.q, c.latent, c.w, c.visible, kScale);
  EXPECT_EQ(meter.current_bytes(), kTokens * kHeads * (kValue * element + wide));
  // Scores of one block; nothing as long as the sequence but one head's output.
  const int64_t blocks = kFusedQueries * (2 * kFusedKeys + kNope + kRope + kValue) +
                         kFusedKeys * (kLatent + kNope + kRope + kValue) + (kNope + kValue) * kLatent;
  constexpr int64_t kAlignment = 64 * 16;
  EXPECT_LE(meter.peak_bytes() - meter.current_bytes(), (blocks + kTokens * kValue) * wide + kAlignment);
}

// Keys in three parts, one joining what was summed over those before; backward each part by itself.
TEST_P(Fused, PartsOfTheKeysJoin) {
  const at::ScalarType dtype = GetParam(), compute = dtype == at::kDouble ? at::kDouble : at::kFloat;
  constexpr int64_t kTokens = 60, kHeads = 3;
  const AttentionCase c = random_case(causal(1, kTokens), kHeads, kHeads, dtype);
  const AttentionGradients want = exact(c);
  const at::NoGradGuard no_grad;
  const auto wide = c.q.options().dtype(compute).requires_grad(false);
  const Tensor out = at::empty({1, kTokens, kHeads, c.v.size(3)}, wide), lse = at::empty({1, kTokens, kHeads}, wide);
  const Tensor grad_q = at::zeros(c.q.sizes(), wide),
               grad_k = at::zeros(c.k.sizes(), c.k.options().requires_grad(false)),
               grad_v = at::zeros(c.v.sizes(), c.v.options().requires_grad(false));
  const auto for_each_part = [&](const auto& body) {
    // The last tokens first: queries whose first part is empty.
    for (const Range part : {Range{41, kTokens}, Range{0, 7}, Range{7, 41}}) {
      std::vector<Range> seen;
      for (int64_t s = 0; s < kTokens; ++s)
        seen.push_back({0, std::clamp<int64_t>(s + 1 - part.begin, 0, part.size())});
      const KeyRanges visible(1, kTokens, part.size(), seen);
      const auto of_part = [&](const Tensor& x) { return x.narrow(1, part.begin, part.size()); };
      body(FusedQuery{c.q, visible, kScale},
           ExplicitKeys(of_part(c.k), of_part(c.v), of_part(grad_k), of_part(grad_v)));
    }
  };
  bool resume = false;
  for_each_part([&](const FusedQuery& query, const ExplicitKeys& keys) {
    fused_forward(query, keys, out, lse, std::exchange(resume, true));
  });
  const Tensor along = out_along_gradient(out, c.grad);
  for_each_part([&](const FusedQuery& query, const ExplicitKeys& keys) {
    fused_backward(query, keys, along, lse, c.grad, grad_q, /*parts=*/true);
  });
  EXPECT_CLOSE(out, want.out, Tolerance::rounding(dtype, kTokens * kHeads, 4));
  const Tensor* got[] = {&grad_q, &grad_k, &grad_v};
  for (size_t i = 0; i < 3; ++i) {
    const Comparison compared = compare(*got[i], want.grads[i], Tolerance::rounding(dtype, kTokens * kHeads, 6),
                                        gradient_scale(want.grads[i], dtype, true));
    EXPECT_TRUE(compared.close) << "gradient of "
                                << "qkv"[i] << ": " << compared.text();
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Fused, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(name(info.param)); });

// bf16 operands as on machines that multiply them natively, by the same library call on any.
TEST(FusedInNativeBf16, MatchesTheDefinition) {
  const ForcedGemm native("native");
  if (block_dtype(at::empty({1}, at::kBFloat16)) != at::kBFloat16) GTEST_SKIP() << "this torch has no MKL";
  for (const KeyRanges& visible : {causal(2, 37), causal(1, 1100), packed(2, 300, true), with_empty_rows(300, 40)}) {
    expect_exact(latent_case(visible, 3, at::kBFloat16));
    expect_exact(fused_attention, random_case(visible, 3, 3, at::kBFloat16), /*from_saved_out=*/true);
    expect_exact(fused_attention, random_case(visible, 3, 1, at::kBFloat16), /*from_saved_out=*/true);
  }
}

TEST(FusedLatents, AgreeWithCentralDifferences) {
  const ThreadCount one(1);  // thousands of runs of microseconds
  for (const KeyRanges& visible : {causal(2, 5), packed(2, 5, false)}) {
    const LatentCase c = latent_case(visible, 2, at::kDouble);
    expect_gradients(
        [&](const auto& in) { return std::vector{fused_latent_attention(in[0], in[1], in[2], visible, kScale)}; },
        {c.q.detach(), c.latent.detach(), c.w.detach()});
  }
}

TEST(FusedLatents, WrongShapesAreNamed) {
  const LatentCase c = latent_case(causal(2, 9), 3, at::kFloat);
  EXPECT_THROW(fused_latent_attention(c.q, c.latent.narrow(1, 0, 8), c.w, c.visible, kScale), ConfigError);
  EXPECT_THROW(fused_latent_attention(c.q, c.latent, c.w.narrow(0, 0, 41), c.visible, kScale), ConfigError);
  EXPECT_THROW(fused_latent_attention(c.q, c.latent.narrow(2, 0, 9), c.w, c.visible, kScale), ConfigError);
}

}  // namespace
}  // namespace parlat
