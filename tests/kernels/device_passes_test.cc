// Attention by torch's operators alone, what runs on other devices, on the CPU: against the definition and the kernel.
#include "parlat/kernels/device_passes.h"

#include <cmath>

#include "parlat/kernels/gemm.h"
#include "tests/kernels/attention_case.h"

namespace parlat {
namespace {

Tensor zeros(const Tensor& like, at::ScalarType dtype) { return at::zeros(like.sizes(), dtype); }

struct Results {
  Tensor out, lse;
  std::vector<Tensor> grads;
};

// Both passes, the keys in so many parts.
template <typename Forward, typename Backward>
Results run(const AttentionCase& c, int64_t n_parts, const Forward& forward, const Backward& backward) {
  const at::ScalarType wide = compute_dtype(c.q.scalar_type());
  const Tensor q = c.q.detach(), k = c.k.detach(), v = c.v.detach();
  const Tensor out = zeros(c.grad, n_parts > 1 ? wide : q.scalar_type()), lse = zeros(c.grad.select(3, 0), wide);
  const std::vector<Tensor> grads = {zeros(q, wide), zeros(k, wide), zeros(v, wide)};
  const auto for_each_part = [&](const auto& body) {
    for (int64_t part = 0; part < n_parts; ++part) {
      const Range keys = even_share(k.size(1), n_parts, part);
      std::vector<Range> seen;
      for (int64_t i = 0; i < c.visible.batch() * c.visible.n_queries(); ++i) {
        const Range& row = c.visible.row(i / c.visible.n_queries(), i % c.visible.n_queries());
        const auto clamped = [&](int64_t at) { return std::clamp(at, keys.begin, keys.end) - keys.begin; };
        seen.push_back({clamped(row.begin), clamped(row.end)});
      }
      const KeyRanges visible(c.visible.batch(), c.visible.n_queries(), keys.size(), seen);
      const auto of_part = [&](const Tensor& x) { return x.narrow(1, keys.begin, keys.size()); };
      body(part, FusedQuery{q, visible, kScale},
           ExplicitKeys(of_part(k), of_part(v), of_part(grads[1]), of_part(grads[2])));
    }
  };
  for_each_part([&](int64_t part, const auto& query, const auto& keys) { forward(query, keys, out, lse, part > 0); });
  const Tensor along = out_along_gradient(out, c.grad);
  for_each_part([&](int64_t, const auto& query, const auto& keys) {
    backward(query, keys, along, lse, c.grad, grads[0], n_parts > 1);
  });
  return {out, lse, grads};
}

// As in attention_case.h; lse and NaN as the kernel has them.
void expect_exact(const AttentionCase& c, int64_t n_parts = 1) {
  const at::ScalarType dtype = c.q.scalar_type();
  const int64_t terms = std::max(c.visible.n_keys(), c.visible.n_queries()) * c.q.size(2);
  const Results got = run(c, n_parts, device_forward, device_backward);
  const Results kernel = run(c, n_parts, fused_forward, fused_backward);
  const AttentionGradients want = exact(c);
  EXPECT_CLOSE(got.out, want.out, Tolerance::rounding(dtype, terms, 3));
  EXPECT_CLOSE(got.lse.exp(), kernel.lse.exp(), Tolerance::rounding(compute_dtype(dtype), terms, 3));
  EXPECT_TRUE(got.lse.isneginf().equal(kernel.lse.isneginf()));
  for (size_t i = 0; i < 3; ++i) {
    const Comparison compared = compare(got.grads[i], want.grads[i], Tolerance::rounding(dtype, terms, 5),
                                        gradient_scale(want.grads[i], dtype, true));
    EXPECT_TRUE(compared.close) << "gradient of "
                                << "qkv"[i] << ": " << compared.text();
  }
}

class DevicePasses : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(DevicePasses, Causal) { expect_exact(random_case(causal(2, 37), 3, 3, GetParam())); }
TEST_P(DevicePasses, CausalOverSeveralBlocks) { expect_exact(random_case(causal(1, 1100), 2, 2, GetParam())); }
TEST_P(DevicePasses, PackedDocuments) { expect_exact(random_case(packed(2, 600, true), 2, 2, GetParam())); }
TEST_P(DevicePasses, NotCausal) { expect_exact(random_case(full(2, 5, 61), 3, 3, GetParam())); }
TEST_P(DevicePasses, OneKeyForAllHeads) { expect_exact(random_case(packed(2, 300, true), 5, 1, GetParam())); }
TEST_P(DevicePasses, RowsWithoutKeys) { expect_exact(random_case(with_empty_rows(300, 40), 2, 2, GetParam())); }
TEST_P(DevicePasses, KeysInParts) { expect_exact(random_case(packed(2, 700, true), 2, 2, GetParam()), 3); }

INSTANTIATE_TEST_SUITE_P(Dtypes, DevicePasses, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(DevicePassesOfLatents, AreTheKernels) {
  constexpr int64_t kHeads = 3, kNope = 8, kRope = 4, kValue = 6, kLatent = 10;
  const KeyRanges visible = packed(2, 600, true);
  const auto values = [](at::IntArrayRef shape, double deviation, const char* name) {
    return seeded_normal(shape, deviation, kAttentionSeed, name, at::kDouble);
  };
  const Tensor q = values({2, 600, kHeads, kNope + kRope}, 1, "q"), latent = values({2, 600, kLatent + kRope}, 1, "c");
  const Tensor w = values({kHeads * (kNope + kValue), kLatent}, 0.3, "w");
  const Tensor grad = values({2, 600, kHeads, kValue}, 1, "grad");
  const auto run = [&](const auto& forward, const auto& backward) {
    std::vector<Tensor> results = {at::zeros_like(grad), at::zeros({2, 600, kHeads}, at::kDouble), at::zeros_like(q),
                                   at::zeros_like(latent), at::zeros_like(w)};
    const LatentKeys keys(latent, w, kHeads, kNope, results[3], results[4]);
    forward(FusedQuery{q, visible, kScale}, keys, results[0], results[1], false);
    backward(FusedQuery{q, visible, kScale}, keys, out_along_gradient(results[0], grad), results[1], grad, results[2],
             false);
    return results;
  };
  const std::vector<Tensor> got = run(device_forward, device_backward), want = run(fused_forward, fused_backward);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_CLOSE(got[i], want[i], Tolerance::rounding(at::kDouble, 600 * kHeads, 6)) << i;
  }
}

TEST(DevicePassesOfPoison, AreNaNWhereTheKernelIs) {
  for (const double poison : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
    for (const bool in_key : {false, true}) {
      const AttentionCase c = random_case(causal(1, 20), 2, 2, at::kFloat);
      const Tensor& poisoned = in_key ? c.k : c.q;
      if (poison < 0) {  // all of a query's scores are -inf
        poisoned.detach().fill_(1);
        (in_key ? c.q : c.k).detach().fill_(-INFINITY);
      } else {
        poisoned.detach()[0][7][1][0] = poison;
      }
      const Results got = run(c, 1, device_forward, device_backward), want = run(c, 1, fused_forward, fused_backward);
      EXPECT_TRUE(got.out.isnan().any(-1).equal(want.out.isnan().any(-1))) << poison << " " << in_key;
      EXPECT_TRUE(got.lse.isnan().equal(want.lse.isnan())) << poison << " " << in_key;
      EXPECT_TRUE(got.grads[0].isnan().any(-1).equal(want.grads[0].isnan().any(-1))) << poison << " " << in_key;
    }
  }
}

}  // namespace
}  // namespace parlat
