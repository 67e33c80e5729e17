// The whole layer on one rank, explicit and absorbed, against the oracle and against each other; and the oracle against
// what can be worked out without it.
#include "parlat/mla/attention.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "parlat/tensor/memory_meter.h"
#include "tests/kernels/central_differences.h"
#include "tests/kernels/forced_gemm.h"
#include "tests/mla/layer.h"

namespace parlat {
namespace {

// Longest chain of products from x to out and back to a weight: query or latent (2), absorption, scores, values,
// un-absorption, output, and most of it again backwards.
constexpr int64_t kDepth = 10, kTerms = 70;

enum class Kind { kExplicit, kAbsorbed };
struct Variant {
  Kind kind;
  at::ScalarType dtype;
  const char* bf16;
};

class Attention : public ::testing::TestWithParam<Variant> {
 protected:
  bool absorbed() const { return GetParam().kind == Kind::kAbsorbed; }

  void expect_oracle(LayerShape shape, bool causal = true) {
    shape.dtype = GetParam().dtype;
    const Layer layer = make_layer(shape);
    const Tensor grad = seeded_normal(layer.x_BSD.sizes(), 1, kSeed, "grad", shape.dtype);
    const OracleResult want = oracle_forward_backward(layer.w, layer.x_BSD, grad, layer.documents, causal);
    const Tensor out = layer.forward(absorbed(), causal);
    out.backward(grad);
    const Tolerance rounding = Tolerance::rounding(shape.dtype, kTerms, kDepth);
    EXPECT_CLOSE(out, want.out, rounding);
    ASSERT_EQ(layer.inputs().size(), want.gradients.size());
    for (const auto& [name, input] : layer.inputs()) {
      EXPECT_CLOSE(input.grad(), want.gradients.at(name), rounding) << "gradient of " << name;
      EXPECT_EQ(input.grad().scalar_type(), shape.dtype) << name;
    }
  }

 private:
  ForcedGemm forced_{GetParam().bf16};
};

TEST_P(Attention, MatchesTheOracle) { expect_oracle({}); }
TEST_P(Attention, MatchesTheOracleWithoutQueryLatent) { expect_oracle({.d_q_latent = {}}); }
TEST_P(Attention, MatchesTheOracleHalfSplit) { expect_oracle({.interleaved = false}); }
TEST_P(Attention, MatchesTheOracleWithoutCausalMask) { expect_oracle({}, /*causal=*/false); }
TEST_P(Attention, MatchesTheOracleWithOneHead) { expect_oracle({.n_heads = 1, .d_v = 16}); }

TEST_P(Attention, RepeatsItsBits) {
  const Layer layer = make_layer({.dtype = GetParam().dtype});
  const Tensor once = layer.forward(absorbed(), true), again = layer.forward(absorbed(), true);
  EXPECT_TRUE(once.equal(again));
  const auto tensors = [&] {
    std::vector<Tensor> all;
    for (const auto& [name, input] : layer.inputs()) all.push_back(input);
    return all;
  }();
  const auto grads = torch::autograd::grad({once}, tensors, {at::ones_like(once)});
  const auto grads_again = torch::autograd::grad({again}, tensors, {at::ones_like(once)});
  for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(grads[i].equal(grads_again[i])) << layer.inputs()[i].first;
}

TEST_P(Attention, NanReachesThoseWhoSeeItAndNoOtherSequence) {
  const Layer layer = make_layer({.dtype = GetParam().dtype});
  layer.x_BSD.detach()[0][2] = NAN;  // the second token of a document of 4
  const Tensor bad_BS = layer.forward(absorbed(), true).isnan().any(-1);
  EXPECT_TRUE(bad_BS[0].slice(0, 2, 5).all().item<bool>());
  EXPECT_FALSE(bad_BS[1].any().item<bool>());
}

// What attention itself holds for the backward pass, its output included, besides q, latent, keys and values.
TEST_P(Attention, KeepsItsClosedForm) {
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Layer layer = make_layer({.dtype = GetParam().dtype});
  const KeyRanges visible = layer.documents.visible(true);
  const Tensor q = project_query(layer.w, layer.x_BSD, layer.rope());
  const Tensor latent = project_latent(layer.w, layer.x_BSD, layer.rope());
  const KeysValues kv = up_project(layer.w.w_ukv, latent, layer.spec.dims);
  meter.reset();
  const Tensor out = absorbed()
                         ? attend_absorbed(layer.spec, q, latent, layer.w.w_ukv, visible, AttentionKernel::kEager)
                         : attend_explicit(layer.spec, q, kv, visible, AttentionKernel::kEager);
  constexpr int64_t kTokens = 70, kHeads = 5, kValues = 12, kLatent = 20, kCache = 28;
  const int64_t probabilities = 2 * kHeads * 35 * 35;
  const int64_t latent_space = absorbed() ? kTokens * kHeads * (kCache + kLatent) : 0;
  EXPECT_EQ(meter.current_bytes(),
            (probabilities + latent_space + kTokens * kHeads * kValues) * int64_t(c10::elementSize(GetParam().dtype)));
}

INSTANTIATE_TEST_SUITE_P(
    Variants, Attention,
    ::testing::Values(Variant{Kind::kExplicit, at::kDouble, "widen"}, Variant{Kind::kExplicit, at::kFloat, "widen"},
                      Variant{Kind::kExplicit, at::kBFloat16, "widen"},
                      Variant{Kind::kExplicit, at::kBFloat16, "native"}, Variant{Kind::kAbsorbed, at::kDouble, "widen"},
                      Variant{Kind::kAbsorbed, at::kFloat, "widen"}, Variant{Kind::kAbsorbed, at::kBFloat16, "widen"},
                      Variant{Kind::kAbsorbed, at::kBFloat16, "native"}),
    [](const auto& info) {
      return fmt::format("{}_{}_{}", info.param.kind == Kind::kAbsorbed ? "absorbed" : "explicit",
                         name(info.param.dtype), info.param.bf16);
    });

TEST(Absorbed, EqualsExplicit) {
  const Layer layer = make_layer({.dtype = at::kDouble});
  EXPECT_CLOSE(layer.attend(true, true), layer.attend(false, true), Tolerance::rounding(at::kDouble, kTerms, 5));
}

TEST(Absorbed, AgreesWithCentralDifferences) {
  MlaSpec spec;
  spec.dims = {.d_model = 4, .n_heads = 2, .d_nope = 2, .d_rope = 2, .d_v = 3, .d_latent = 3, .d_q_latent = {}};
  const KeyRanges visible = Documents::packed(4, {{1, 3}}).visible(true);
  expect_gradients([&](const auto& in) { return std::vector{attend_absorbed(spec, in[0], in[1], in[2], visible)}; },
                   {seeded_normal({1, 4, 2, 4}, 1, kSeed, "q"), seeded_normal({1, 4, 5}, 1, kSeed, "latent"),
                    seeded_normal({10, 3}, 1, kSeed, "w_ukv")});
}

// A document of one token sees itself: out = w_o w_uv c_kv, and queries have no say.
TEST(Oracle, OneTokenSeesItself) {
  const Layer layer = make_layer({.dtype = at::kDouble});
  const Documents singles = Documents::packed(35, {std::vector<int64_t>(35, 1), std::vector<int64_t>(35, 1)});
  const Tensor c_kv_raw = at::matmul(layer.x_BSD, layer.w.w_dkv.narrow(0, 0, 20).t());
  const Tensor c_kv = c_kv_raw / (c_kv_raw.square().mean({-1}, true) + 1e-6).sqrt() * layer.w.kv_norm;
  const Tensor w_uv = layer.w.w_ukv.view({5, 28, 20}).narrow(1, 16, 12).reshape({60, 20});
  EXPECT_CLOSE(oracle_attention(layer.w, layer.x_BSD, singles), at::matmul(at::matmul(c_kv, w_uv.t()), layer.w.w_o.t()),
               Tolerance::rounding(at::kDouble, 60, 3));
}

// Packed documents are documents on their own.
TEST(Oracle, DocumentsDoNotSeeEachOther) {
  const Layer layer = make_layer({.dtype = at::kDouble});
  const Tensor packed = oracle_attention(layer.w, layer.x_BSD, layer.documents);
  const Tensor alone = layer.x_BSD.narrow(0, 0, 1).narrow(1, 5, 30);
  EXPECT_CLOSE(packed.narrow(0, 0, 1).narrow(1, 5, 30), oracle_attention(layer.w, alone, Documents::whole(1, 30)),
               Tolerance::rounding(at::kDouble, 60, 6));
}

TEST(Oracle, CausalMaskHidesTheFuture) {
  const Layer layer = make_layer({.dtype = at::kDouble});
  const Documents whole = Documents::whole(2, 35);
  const Tensor changed = layer.x_BSD.detach().clone();
  changed.select(1, 20) += 1;
  for (const bool causal : {true, false}) {
    const Tensor moved =
        (oracle_attention(layer.w, layer.x_BSD, whole, causal) - oracle_attention(layer.w, changed, whole, causal))
            .abs()
            .amax({0, 2});
    EXPECT_EQ(moved.slice(0, 0, 20).max().item<double>() == 0, causal);
    EXPECT_GT(moved.slice(0, 20).min().item<double>(), 0);
  }
}

TEST(Oracle, GradientsAgreeWithCentralDifferences) {
  MlaSpec spec;
  spec.dims = {.d_model = 3, .n_heads = 2, .d_nope = 2, .d_rope = 2, .d_v = 2, .d_latent = 2, .d_q_latent = 2};
  const MlaWeights w = random_mla_weights(spec, kSeed, at::kDouble);
  expect_gradients(
      [&](const auto& in) {
        const MlaWeights v{spec, in[1], in[2], in[3], in[4], in[5], in[6], in[7]};
        return std::vector{oracle_attention(v, in[0], Documents::packed(4, {{1, 3}}))};
      },
      {seeded_normal({1, 4, 3}, 1, kSeed, "x"), w.w_dq, w.q_norm, w.w_uq, w.w_dkv, w.kv_norm, w.w_ukv, w.w_o});
}

TEST(Oracle, WeightsDependOnSeedAndNameOnly) {
  const Layer layer = make_layer({});
  for (const auto& [name, weight] : named_weights(random_mla_weights(layer.spec, kSeed, at::kFloat))) {
    for (const auto& [other_name, other] : named_weights(layer.w)) {
      if (name == other_name) {
        EXPECT_TRUE(weight.equal(other)) << name;
      }
    }
  }
  EXPECT_EQ(named_weights(make_layer({.d_q_latent = {}}).w).front().first, "w_uq");
}

}  // namespace
}  // namespace parlat
