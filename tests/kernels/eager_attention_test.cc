// Attention with materialised probabilities against plain torch in fp64.
#include "parlat/kernels/eager_attention.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "parlat/base/error.h"
#include "parlat/tensor/memory_meter.h"
#include "tests/kernels/central_differences.h"
#include "tests/thread_count.h"

namespace parlat {
namespace {

constexpr uint64_t kSeed = 5;
constexpr double kScale = 0.3;

// The keys of each query, of one sequence after the other.
KeyRanges causal(int64_t batch, int64_t n) {
  std::vector<Range> rows;
  for (int64_t i = 0; i < batch * n; ++i) rows.push_back({0, i % n + 1});
  return {batch, n, n, rows};
}
KeyRanges full(int64_t batch, int64_t n_queries, int64_t n_keys) {
  return {batch, n_queries, n_keys, std::vector<Range>(batch * n_queries, {0, n_keys})};
}
// Documents of 1, 2, 3, ... tokens; sequences differ.
KeyRanges packed(int64_t batch, int64_t n, bool causal) {
  std::vector<Range> rows;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t begin = 0, length = b + 1; begin < n; begin += length++) {
      const int64_t end = std::min(begin + length, n);
      for (int64_t i = begin; i < end; ++i) rows.push_back({begin, causal ? i + 1 : end});
    }
  }
  return {batch, n, n, rows};
}
// Every third query sees nothing, and so does the whole first block.
KeyRanges with_empty_rows(int64_t n_queries, int64_t n_keys) {
  std::vector<Range> rows;
  for (int64_t i = 0; i < n_queries; ++i) {
    rows.push_back(i < 256 || i % 3 == 0 ? Range{2, 2} : Range{i % n_keys / 2, i % n_keys + 1});
  }
  return {1, n_queries, n_keys, rows};
}

struct Case {
  Tensor q, k, v, grad;
  KeyRanges visible;
  std::vector<Tensor> inputs() const { return {q, k, v}; }
};

Case random_case(const KeyRanges& visible, int64_t n_heads, int64_t n_key_heads, at::ScalarType dtype, int64_t d = 12,
                 int64_t d_v = 8) {
  const auto leaf = [&](int64_t tokens, int64_t heads, int64_t columns, const char* name) {
    return seeded_normal({visible.batch(), tokens, heads, columns}, 1, kSeed, name, dtype).requires_grad_();
  };
  return {leaf(visible.n_queries(), n_heads, d, "q"), leaf(visible.n_keys(), n_key_heads, d, "k"),
          leaf(visible.n_keys(), n_key_heads, d_v, "v"), leaf(visible.n_queries(), n_heads, d_v, "grad").detach(),
          visible};
}

struct Result {
  Tensor out;
  std::vector<Tensor> grads;
};

Result run(const Case& c) {
  const Tensor out = eager_attention(c.q, c.k, c.v, c.visible, kScale);
  return {out.detach(), torch::autograd::grad({out}, c.inputs(), {c.grad})};
}

// The definition in fp64 under torch's own autograd.
Result exact(const Case& c) {
  const KeyRanges& visible = c.visible;
  const Tensor mask = at::zeros({visible.batch(), 1, visible.n_queries(), visible.n_keys()}, at::kBool);
  for (int64_t b = 0; b < visible.batch(); ++b) {
    for (int64_t s = 0; s < visible.n_queries(); ++s) {
      mask[b][0][s].slice(0, visible.row(b, s).begin, visible.row(b, s).end).fill_(true);
    }
  }
  const Tensor q = c.q.to(at::kDouble).transpose(1, 2), k = c.k.to(at::kDouble).transpose(1, 2),
               v = c.v.to(at::kDouble).transpose(1, 2);
  const Tensor scores = (at::matmul(q, k.mT()) * kScale).masked_fill(mask.logical_not(), -INFINITY);
  const Tensor p = at::where(mask.any(-1, true), scores.softmax(-1), at::zeros({}, at::kDouble));
  const Tensor out = at::matmul(at::where(mask, p, at::zeros({}, at::kDouble)), v).transpose(1, 2);
  return {out.detach(), torch::autograd::grad({out}, c.inputs(), {c.grad.to(at::kDouble)})};
}

// Scores, softmax and the weighted sum; backward the probabilities' gradient, theirs through softmax and the products.
void expect_exact(const Case& c) {
  const at::ScalarType dtype = c.q.scalar_type();
  const int64_t terms = std::max(c.visible.n_keys(), c.visible.n_queries()) * c.q.size(2);
  const Result got = run(c), want = exact(c);
  EXPECT_EQ(got.out.scalar_type(), dtype);
  EXPECT_CLOSE(got.out, want.out, Tolerance::rounding(dtype, terms, 3));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_CLOSE(got.grads[i], want.grads[i], Tolerance::rounding(dtype, terms, 5)) << "gradient of "
                                                                                    << "qkv"[i];
  }
}

class Eager : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Eager, Causal) { expect_exact(random_case(causal(2, 37), 3, 3, GetParam())); }
TEST_P(Eager, CausalOverSeveralBlocks) { expect_exact(random_case(causal(1, 600), 2, 2, GetParam())); }
TEST_P(Eager, NotCausal) { expect_exact(random_case(full(2, 29, 29), 3, 3, GetParam())); }
TEST_P(Eager, MoreKeysThanQueries) { expect_exact(random_case(full(2, 5, 61), 3, 3, GetParam())); }
TEST_P(Eager, PackedDocuments) { expect_exact(random_case(packed(2, 300, true), 2, 2, GetParam())); }
TEST_P(Eager, PackedDocumentsNotCausal) { expect_exact(random_case(packed(2, 300, false), 2, 2, GetParam())); }
TEST_P(Eager, OneKeyForAllHeads) { expect_exact(random_case(packed(2, 300, true), 5, 1, GetParam())); }
TEST_P(Eager, OneHead) { expect_exact(random_case(causal(2, 9), 1, 1, GetParam())); }

TEST_P(Eager, RowsWithoutKeysGiveZero) {
  const Case c = random_case(with_empty_rows(300, 40), 2, 2, GetParam());
  expect_exact(c);
  const Result got = run(c);
  EXPECT_EQ(got.out[0].slice(0, 0, 256).abs().sum().item<double>(), 0);
  EXPECT_EQ(got.grads[0][0][258].abs().sum().item<double>(), 0);
}

TEST_P(Eager, NoQueriesOrNoKeys) {
  for (const auto& [n_queries, n_keys] : {std::pair<int64_t, int64_t>{0, 3}, {3, 0}, {0, 0}}) {
    const KeyRanges none(2, n_queries, n_keys, std::vector<Range>(2 * n_queries, {0, 0}));
    const Result got = run(random_case(none, 2, 2, GetParam()));
    EXPECT_EQ(got.out.sizes(), (std::vector<int64_t>{2, n_queries, 2, 8}));
    for (const Tensor& t : {got.out, got.grads[0], got.grads[1], got.grads[2]})
      EXPECT_EQ(t.abs().sum().item<double>(), 0);
  }
}

TEST_P(Eager, StridesDoNotMatter) {
  const Case plain = random_case(causal(2, 37), 3, 3, GetParam());
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

TEST_P(Eager, RepeatsItsBitsOnAnyNumberOfThreads) {
  const Case c = random_case(packed(2, 300, true), 4, 4, GetParam());
  const auto on_threads = [&](int threads) {
    const ThreadCount count(threads);
    return run(c);
  };
  const Result once = on_threads(1), again = on_threads(1), parallel = on_threads(2);
  for (const Result* other : {&again, &parallel}) {
    EXPECT_TRUE(once.out.equal(other->out));
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(once.grads[i].equal(other->grads[i])) << "qkv"[i];
  }
}

TEST_P(Eager, NanReachesThoseWhoSeeIt) {
  const KeyRanges visible = causal(1, 20);
  const auto bad_rows = [](const Case& c) { return run(c).out.isnan().any(-1)[0]; };  // [S, H]
  for (const double poison : {double{NAN}, double{INFINITY}}) {
    const Case c = random_case(visible, 2, 2, GetParam());
    c.q.detach()[0][7][1][0] = poison;
    const Tensor bad = bad_rows(c);
    EXPECT_TRUE(bad[7][1].item<bool>());
    EXPECT_EQ(bad.sum().item<int64_t>(), 1);
  }
  const Case bad_key = random_case(visible, 2, 2, GetParam());
  bad_key.k.detach()[0][7][1][0] = NAN;
  const Tensor bad = bad_rows(bad_key);
  EXPECT_EQ(bad.slice(0, 7).select(1, 1).sum().item<int64_t>(), 13);
  EXPECT_EQ(bad.sum().item<int64_t>(), 13);

  const Case bad_gradient = random_case(visible, 2, 2, GetParam());
  bad_gradient.grad[0][3][0][0] = NAN;
  EXPECT_TRUE(run(bad_gradient).grads[0][0][3][0].isnan().all().item<bool>());
}

// Between forward and backward: the output and the probabilities, nothing else. In the backward pass: gradients, and
// scratch of one head.
TEST_P(Eager, KeepsTheProbabilitiesOnly) {
  constexpr int64_t kTokens = 300, kHeads = 6, kColumns = 12, kValues = 8;
  const int64_t element = c10::elementSize(GetParam()),
                wide = c10::elementSize(GetParam() == at::kDouble ? at::kDouble : at::kFloat);
  const ThreadCount one(1);  // scratch is a thread's
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Case c = random_case(causal(1, kTokens), kHeads, kHeads, GetParam(), kColumns, kValues);
  meter.reset();
  const Tensor out = eager_attention(c.q, c.k, c.v, c.visible, kScale);
  EXPECT_EQ(meter.current_bytes(), (kHeads * kTokens * kTokens + kTokens * kHeads * kValues) * element);

  const int64_t before = meter.current_bytes();
  const auto grads = torch::autograd::grad({out}, c.inputs(), {c.grad}, /*retain_graph=*/true);
  const int64_t gradients = kTokens * kHeads * (2 * kColumns + kValues) * element;
  const int64_t scratch = 2 * kTokens * (kColumns + kValues) + 256 * (2 * kTokens + 2 * kColumns + kValues);
  constexpr int64_t kAlignment = 64 * 16;
  EXPECT_LE(meter.peak_bytes() - before, gradients + scratch * wide + kAlignment);
}

// Two heads on two threads need scratch of both at some moment, sooner or later.
TEST_P(Eager, TheMeterSeesEveryThread) {
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Case c = random_case(causal(1, 1000), 2, 2, GetParam());
  const at::NoGradGuard no_grad;
  const auto peak = [&](int threads) {
    const ThreadCount count(threads);
    meter.reset();
    eager_attention(c.q, c.k, c.v, c.visible, kScale);
    return meter.peak_bytes();
  };
  const int64_t of_one = peak(1);
  int64_t of_two = 0;
  for (int i = 0; i < 100 && of_two <= of_one; ++i) of_two = peak(2);
  EXPECT_GT(of_two, of_one);
}

TEST_P(Eager, WithoutAutogradNoProbabilitiesExist) {
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Case c = random_case(causal(1, 1000), 4, 4, GetParam());
  const Tensor want = run(c).out;
  meter.reset();
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(eager_attention(c.q, c.k, c.v, c.visible, kScale).equal(want));
  EXPECT_LE(meter.peak_bytes(), 4 * 1000 * 1000 * static_cast<int64_t>(c10::elementSize(GetParam())) / 2);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Eager, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(Eager, AgreesWithCentralDifferences) {
  for (const KeyRanges& visible : {causal(2, 5), packed(2, 5, false)}) {
    for (const int64_t n_key_heads : {2, 1}) {
      const Case c = random_case(visible, 2, n_key_heads, at::kDouble, 4, 3);
      expect_gradients(
          [&](const auto& in) { return std::vector{eager_attention(in[0], in[1], in[2], visible, kScale)}; },
          {c.q.detach(), c.k.detach(), c.v.detach()});
    }
  }
}

TEST(Eager, WrongShapesAreNamed) {
  const Case c = random_case(causal(2, 9), 3, 3, at::kFloat);
  try {
    eager_attention(c.q, c.k.narrow(2, 0, 2), c.v, c.visible, kScale);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "k: expected shape [2, 9, 3, 12], got [2, 9, 2, 12]");
  }
}

}  // namespace
}  // namespace parlat
