// Attention that rebuilds keys and values from latents, joins parts, and what it keeps.
#include "parlat/kernels/fused_attention.h"

#include <functional>

#include "parlat/kernels/attention_inputs.h"
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

// Every 64th query of a causal sequence: rows of up to 16384 keys.
TEST_P(Fused, LatentsOfSixteenThousandTokens) {
  std::vector<Range> rows;
  for (int64_t query = 63; query < 16384; query += 64) rows.push_back({0, query + 1});
  expect_exact(latent_case(KeyRanges(1, 256, 16384, rows), 1, GetParam()));
}

TEST_P(Fused, LatentsRepeatTheirBitsOnAnyNumberOfThreads) {
  const LatentCase c = latent_case(packed(2, 600, true), 5, GetParam());
  expect_same_bits_on_threads([&] { return run(c); });
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
  // Where operands stay bf16: what was summed, rounded.
  const int64_t rounded = rounded_size(c.q, 2 * kFusedQueries * kFusedKeys + kFusedKeys * (kNope + kValue)) * element;
  constexpr int64_t kAlignment = 64 * 16;
  EXPECT_LE(meter.peak_bytes() - meter.current_bytes(), (blocks + kTokens * kValue) * wide + rounded + kAlignment);

  // Backward: gradients, and the latents' in the dtype of sums; one number a query and head; scores of one block
  // again, gradients of one block and of one head's weight, and, where they are rounded, of one head's queries.
  const int64_t before = meter.current_bytes();
  meter.reset();
  const auto grads = torch::autograd::grad({out}, c.inputs(), {c.grad}, /*retain_graph=*/true);
  const int64_t of_latents = kTokens * (kLatent + kRope), of_weights = kHeads * (kNope + kValue) * kLatent;
  int64_t bytes = (kTokens * kHeads * (kNope + kRope) + of_latents + of_weights) * element + rounded + kAlignment;
  bytes += (kTokens * kHeads + blocks + kFusedQueries * kValue + kFusedKeys * (kNope + kRope + kValue) +
            (kNope + kValue) * kLatent) *
           wide;
  if (element < wide) bytes += (of_latents + kTokens * (kNope + kRope)) * wide;
  EXPECT_LE(meter.peak_bytes() - before, bytes);
}

// Of the definition's scores in fp64: [B, S, H], -inf where a query sees nothing.
Tensor exact_lse(const AttentionCase& c) {
  const Tensor lse = at::full(c.grad.sizes().slice(0, 3), -INFINITY, at::kDouble);
  for (int64_t b = 0; b < c.visible.batch(); ++b) {
    for (int64_t s = 0; s < c.visible.n_queries(); ++s) {
      const Range seen = c.visible.row(b, s);
      if (seen.size() == 0) continue;
      const Tensor k_THd = c.k.detach()[b].slice(0, seen.begin, seen.end).to(at::kDouble);
      lse[b][s].copy_(((k_THd * c.q.detach()[b][s].to(at::kDouble)).sum(2) * kScale).logsumexp(0));
    }
  }
  return lse;
}

// As the keys of a ring arrive: the last first, for whom some queries' first part is empty, each joining what was
// summed over those before; backward each part by itself.
class InParts {
 public:
  // keys_of(part): its keys, with the place of their gradients.
  template <typename KeysOf>
  InParts(const Tensor& q, const Tensor& grad, const KeyRanges& visible, const std::vector<Range>& parts,
          const KeysOf& keys_of)
      : out(at::empty(grad.sizes(), compute_options(q))), lse(at::empty(grad.sizes().slice(0, 3), compute_options(q))) {
    const at::NoGradGuard no_grad;
    bool resume = false;
    for (const Range& part : parts) {
      const KeyRanges seen = seen_of(visible, part);
      fused_forward({q, seen, kScale}, keys_of(part), out, lse, std::exchange(resume, true));
    }
    const Tensor along = out_along_gradient(out, grad);
    QueryGradient sums = QueryGradient::zeros(q, static_cast<int>(parts.size()));
    for (const Range& part : parts) {
      const KeyRanges seen = seen_of(visible, part);
      fused_backward({q, seen, kScale}, keys_of(part), along, lse, grad, sums, /*parts=*/true);
    }
    grad_q = std::move(sums).finish(compute_options(q).dtype().toScalarType());
  }
  Tensor out, lse, grad_q;

 private:
  static KeyRanges seen_of(const KeyRanges& visible, Range part) {
    std::vector<Range> rows;
    for (int64_t i = 0; i < visible.batch() * visible.n_queries(); ++i) {
      const Range& row = visible.row(i / visible.n_queries(), i % visible.n_queries());
      const auto clamped = [&](int64_t at) { return std::clamp(at, part.begin, part.end) - part.begin; };
      rows.push_back({clamped(row.begin), clamped(row.end)});
    }
    return {visible.batch(), visible.n_queries(), part.size(), rows};
  }
};

void expect_gradient(const Tensor& got, const Tensor& want, at::ScalarType dtype, int64_t terms, const char* what) {
  const Comparison compared =
      compare(got, want, Tolerance::rounding(dtype, terms, 6), gradient_scale(want, dtype, /*from_saved_out=*/true));
  EXPECT_TRUE(compared.close) << "gradient of " << what << ": " << compared.text();
}

void expect_parts_join(const AttentionCase& c, const std::vector<Range>& parts) {
  const at::ScalarType dtype = c.q.scalar_type();
  const auto of_part = [](const Tensor& x, Range part) { return x.detach().narrow(1, part.begin, part.size()); };
  const Tensor grad_k = at::zeros_like(c.k), grad_v = at::zeros_like(c.v);
  const InParts got(c.q.detach(), c.grad, c.visible, parts, [&](Range part) {
    return ExplicitKeys(of_part(c.k, part), of_part(c.v, part), of_part(grad_k, part), of_part(grad_v, part));
  });
  const AttentionGradients want = exact(c);
  const int64_t terms = c.visible.n_keys() * c.q.size(2);
  EXPECT_CLOSE(got.out, want.out, Tolerance::rounding(dtype, terms, 4));
  const Tensor lse = exact_lse(c);
  EXPECT_TRUE(got.lse.isneginf().equal(lse.isneginf()));
  EXPECT_TRUE(got.out.index({lse.isneginf()}).eq(0).all().item<bool>());
  EXPECT_CLOSE(got.lse.exp(), lse.exp(), Tolerance::rounding(dtype, terms, 4));
  expect_gradient(got.grad_q, want.grads[0], dtype, terms, "q");
  expect_gradient(grad_k, want.grads[1], dtype, terms, "k");
  expect_gradient(grad_v, want.grads[2], dtype, terms, "v");
}

void expect_parts_join(const LatentCase& c, const std::vector<Range>& parts) {
  const at::ScalarType dtype = c.q.scalar_type();
  const Tensor latent = c.latent.detach(), w = c.w.detach(), grad_w = at::zeros(w.sizes(), compute_options(w)),
               grad_latent = at::zeros(latent.sizes(), compute_options(latent));
  const InParts got(c.q.detach(), c.grad, c.visible, parts, [&](Range part) {
    return LatentKeys(latent.narrow(1, part.begin, part.size()), w, c.q.size(2), kNope,
                      grad_latent.narrow(1, part.begin, part.size()), grad_w);
  });
  const AttentionGradients want = exact(c);
  const int64_t terms = c.visible.n_keys() * c.q.size(2);
  EXPECT_CLOSE(got.out, want.out, Tolerance::rounding(dtype, terms, 4));
  expect_gradient(got.grad_q, want.grads[0], dtype, terms, "q");
  expect_gradient(grad_latent, want.grads[1], dtype, terms, "latent");
  expect_gradient(grad_w, want.grads[2], dtype, terms, "w_ukv");
}

TEST_P(Fused, PartsOfTheKeysJoin) {
  expect_parts_join(random_case(causal(1, 60), 3, 3, GetParam()), {{41, 60}, {0, 7}, {7, 41}});
  for (const auto& parts : {std::vector<Range>{{0, 40}}, {{11, 40}, {0, 11}}})
    expect_parts_join(random_case(with_empty_rows(300, 40), 2, 2, GetParam()), parts);
}
// Several blocks in every part but one.
TEST_P(Fused, PartsOfSeveralBlocksJoin) {
  const std::vector<Range> parts = {{820, 1500}, {0, 7}, {7, 820}};
  expect_parts_join(random_case(causal(1, 1500), 1, 1, GetParam()), parts);
  expect_parts_join(latent_case(causal(1, 1500), 2, GetParam()), parts);
}
TEST_P(Fused, PartsOfSixteenThousandTokensJoin) {
  const std::vector<Range> parts = {{12288, 16384}, {8192, 12288}, {4096, 8192}, {0, 4096}};
  expect_parts_join(random_case(few_queries(16384), 2, 2, GetParam()), parts);
  expect_parts_join(latent_case(few_queries(16384), 2, GetParam()), parts);
}

// NaN and infinities as the definition has them, in what all heads share and in one head's.
TEST_P(Fused, PoisonReachesThoseWhoSeeIt) {
  const auto expect_bad = [](const Tensor& bad_SH, const std::function<bool(int64_t, int64_t)>& expected) {
    for (int64_t s = 0; s < bad_SH.size(0); ++s) {
      for (int64_t h = 0; h < bad_SH.size(1); ++h)
        EXPECT_EQ(bad_SH[s][h].item<bool>(), expected(s, h)) << "query " << s << ", head " << h;
    }
  };
  const auto bad = [](const Tensor& x_BSHd, int64_t b) { return x_BSHd[b].isfinite().all(-1).logical_not(); };
  for (const double poison : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
    SCOPED_TRACE(poison);
    const auto poisoned = [&](const auto& place) {
      const LatentCase c = latent_case(causal(2, 20), 3, GetParam());
      place(c).fill_(poison);
      return run(c);
    };
    // The key alone, of token 7 in the first sequence: a score of NaN or +inf poisons, one of -inf hides the key.
    LatentCase c = latent_case(causal(2, 20), 3, GetParam());
    c.latent.detach()[0][7][kLatent] = poison;
    const Tensor hides = (c.q.detach()[0].select(-1, kNope) * poison).isneginf();
    const Tensor out = run(c).out;
    expect_bad(bad(out, 0), [&](int64_t s, int64_t h) { return s >= 7 && !hides[s][h].item<bool>(); });
    EXPECT_FALSE(bad(out, 1).any().item<bool>());
    // The key, and the value, which those that don't see it meet as 0 times NaN.
    const AttentionGradients latent = poisoned([](const LatentCase& c) { return c.latent.detach()[0][7][0]; });
    EXPECT_TRUE(bad(latent.out, 0).slice(0, 7).all().item<bool>());
    EXPECT_TRUE(bad(latent.grads[0], 0).slice(0, 7).all().item<bool>());
    for (const Tensor& clean : {latent.out, latent.grads[0]}) EXPECT_FALSE(bad(clean, 1).any().item<bool>());
    EXPECT_TRUE(latent.grads[1][0][7].isnan().all().item<bool>());
    EXPECT_TRUE(latent.grads[1][1].isfinite().all().item<bool>());
    EXPECT_TRUE(latent.grads[2].isnan().all().item<bool>());
    // A row of w_uk, one of w_uv: the second head's.
    for (const int64_t row : {int64_t{3}, kNope + 2}) {
      const AttentionGradients weight =
          poisoned([&](const LatentCase& c) { return c.w.detach()[1 * (kNope + kValue) + row]; });
      expect_bad(bad(weight.out, 0), [](int64_t, int64_t h) { return h == 1; });
      expect_bad(bad(weight.grads[0], 1), [](int64_t, int64_t h) { return h == 1; });
      EXPECT_TRUE(weight.grads[1].slice(2, 0, kLatent).isnan().all().item<bool>());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Fused, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(name(info.param)); });

// bf16 operands as on machines that multiply them natively; on others each block is widened for its product.
TEST(FusedInNativeBf16, MatchesTheDefinition) {
  const ForcedGemm native("native");
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

}  // namespace
}  // namespace parlat
