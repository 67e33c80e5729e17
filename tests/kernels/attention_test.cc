// Every kernel of attention against plain torch in fp64.
#include <gmock/gmock.h>

#include "parlat/kernels/eager_attention.h"
#include "parlat/kernels/fused_attention.h"
#include "tests/kernels/attention_case.h"
#include "tests/thread_count.h"

namespace parlat {
namespace {

using Case = AttentionCase;

struct Kernel {
  const char* name;
  AttentionKernel function;
};

class Attention : public ::testing::TestWithParam<std::tuple<Kernel, at::ScalarType>> {
 protected:
  static AttentionKernel kernel() { return std::get<0>(GetParam()).function; }
  static at::ScalarType dtype() { return std::get<1>(GetParam()); }
  static AttentionGradients run(const Case& c) { return parlat::run(kernel(), c); }
  static void expect_exact(const Case& c) { parlat::expect_exact(kernel(), c, kernel() == fused_attention); }
};

TEST_P(Attention, Causal) { expect_exact(random_case(causal(2, 37), 3, 3, dtype())); }
TEST_P(Attention, CausalOverSeveralBlocks) { expect_exact(random_case(causal(1, 600), 2, 2, dtype())); }
TEST_P(Attention, CausalOverSeveralBlocksOfKeys) { expect_exact(random_case(causal(1, 1100), 2, 2, dtype())); }
TEST_P(Attention, NotCausal) { expect_exact(random_case(full(2, 29, 29), 3, 3, dtype())); }
TEST_P(Attention, MoreKeysThanQueries) { expect_exact(random_case(full(2, 5, 61), 3, 3, dtype())); }
TEST_P(Attention, PackedDocuments) { expect_exact(random_case(packed(2, 300, true), 2, 2, dtype())); }
TEST_P(Attention, PackedDocumentsNotCausal) { expect_exact(random_case(packed(2, 300, false), 2, 2, dtype())); }
TEST_P(Attention, OneKeyForAllHeads) { expect_exact(random_case(packed(2, 300, true), 5, 1, dtype())); }
TEST_P(Attention, OneKeyForAllHeadsOverSeveralBlocks) { expect_exact(random_case(causal(1, 600), 3, 1, dtype())); }
TEST_P(Attention, SixteenThousandKeys) { expect_exact(random_case(few_queries(16384), 2, 2, dtype())); }
TEST_P(Attention, SixteenThousandKeysForAllHeads) { expect_exact(random_case(few_queries(16384), 2, 1, dtype())); }
TEST_P(Attention, OneHead) { expect_exact(random_case(causal(2, 9), 1, 1, dtype())); }

TEST_P(Attention, RowsWithoutKeysGiveZero) {
  const Case c = random_case(with_empty_rows(300, 40), 2, 2, dtype());
  expect_exact(c);
  const AttentionGradients got = run(c);
  EXPECT_EQ(got.out[0].slice(0, 0, 256).abs().sum().item<double>(), 0);
  EXPECT_EQ(got.grads[0][0][258].abs().sum().item<double>(), 0);
}

TEST_P(Attention, NoQueriesOrNoKeys) {
  for (const auto& [n_queries, n_keys] : {std::pair<int64_t, int64_t>{0, 3}, {3, 0}, {0, 0}}) {
    const KeyRanges none(2, n_queries, n_keys, std::vector<Range>(2 * n_queries, {0, 0}));
    const AttentionGradients got = run(random_case(none, 2, 2, dtype()));
    EXPECT_EQ(got.out.sizes(), (std::vector<int64_t>{2, n_queries, 2, 8}));
    for (const Tensor& t : {got.out, got.grads[0], got.grads[1], got.grads[2]})
      EXPECT_EQ(t.abs().sum().item<double>(), 0);
  }
}

TEST_P(Attention, StridesDoNotMatter) {
  const Case plain = random_case(causal(2, 37), 3, 3, dtype());
  const auto heads_first = [](const Tensor& t) {
    return t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_();
  };
  const auto columns_of_more = [](const Tensor& t) {
    return at::cat({t, t}, 3).narrow(3, 0, t.size(3)).detach().requires_grad_();
  };
  const Case strided{heads_first(plain.q), columns_of_more(plain.k), heads_first(plain.v),
                     plain.grad.flip({3}).flip({3}).transpose(1, 2).contiguous().transpose(1, 2), plain.visible};
  expect_exact(strided);
}

TEST_P(Attention, RepeatsItsBitsOnAnyNumberOfThreads) {
  for (const Case& c : {random_case(packed(2, 300, true), 4, 4, dtype()), random_case(causal(1, 600), 3, 1, dtype())}) {
    expect_same_bits_on_threads([&] { return run(c); });
  }
}

TEST_P(Attention, NanReachesThoseWhoSeeIt) {
  const KeyRanges visible = causal(1, 20);
  const auto bad_rows = [](const Case& c) { return run(c).out.isnan().any(-1)[0]; };  // [S, H]
  for (const double poison : {double{NAN}, double{INFINITY}}) {
    const Case c = random_case(visible, 2, 2, dtype());
    c.q.detach()[0][7][1][0] = poison;
    const Tensor bad = bad_rows(c);
    EXPECT_TRUE(bad[7][1].item<bool>());
    EXPECT_EQ(bad.sum().item<int64_t>(), 1);
  }
  const Case bad_key = random_case(visible, 2, 2, dtype());
  bad_key.k.detach()[0][7][1][0] = NAN;
  const Tensor bad = bad_rows(bad_key);
  EXPECT_EQ(bad.slice(0, 7).select(1, 1).sum().item<int64_t>(), 13);
  EXPECT_EQ(bad.sum().item<int64_t>(), 13);

  const Case bad_gradient = random_case(visible, 2, 2, dtype());
  bad_gradient.grad[0][3][0][0] = NAN;
  EXPECT_TRUE(run(bad_gradient).grads[0][0][3][0].isnan().all().item<bool>());
}

const Kernel kKernels[] = {{"eager", eager_attention}, {"fused", fused_attention}};

INSTANTIATE_TEST_SUITE_P(Kernels, Attention,
                         ::testing::Combine(::testing::ValuesIn(kKernels),
                                            ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::string(name(std::get<1>(info.param)));
                         });

TEST(AttentionKernels, AgreesWithCentralDifferences) {
  for (const KeyRanges& visible : {causal(2, 5), packed(2, 5, false)}) {
    for (const int64_t n_key_heads : {2, 1}) {
      const Case c = random_case(visible, 2, n_key_heads, at::kDouble, 4, 3);
      for (const Kernel& kernel : kKernels) {
        expect_gradients(
            [&](const auto& in) { return std::vector{kernel.function(in[0], in[1], in[2], visible, kScale)}; },
            {c.q.detach(), c.k.detach(), c.v.detach()});
      }
    }
  }
}

}  // namespace
}  // namespace parlat
