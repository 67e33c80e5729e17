// Cases of attention and their definition in fp64, for every kernel.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "parlat/kernels/key_ranges.h"
#include "tests/kernels/central_differences.h"
#include "tests/thread_count.h"

namespace parlat {

inline constexpr uint64_t kAttentionSeed = 5;
inline constexpr double kScale = 0.3;

using AttentionKernel = Tensor (*)(const Tensor& q, const Tensor& k, const Tensor& v, const KeyRanges&, double scale);

// The keys of each query, of one sequence after the other.
inline KeyRanges causal(int64_t batch, int64_t n) {
  std::vector<Range> rows;
  for (int64_t i = 0; i < batch * n; ++i) rows.push_back({0, i % n + 1});
  return {batch, n, n, rows};
}
inline KeyRanges full(int64_t batch, int64_t n_queries, int64_t n_keys) {
  return {batch, n_queries, n_keys, std::vector<Range>(batch * n_queries, {0, n_keys})};
}
// A few queries far apart, the last of which sees all keys.
inline KeyRanges few_queries(int64_t n_keys) {
  std::vector<Range> rows;
  for (int64_t i = 1; i <= 12; ++i) rows.push_back({0, i * n_keys / 12});
  return {1, 12, n_keys, rows};
}
// Documents of 1, 2, 3, ... tokens; sequences differ.
inline KeyRanges packed(int64_t batch, int64_t n, bool causal) {
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
inline KeyRanges with_empty_rows(int64_t n_queries, int64_t n_keys) {
  std::vector<Range> rows;
  for (int64_t i = 0; i < n_queries; ++i) {
    rows.push_back(i < 256 || i % 3 == 0 ? Range{2, 2} : Range{i % n_keys / 2, i % n_keys + 1});
  }
  return {1, n_queries, n_keys, rows};
}

struct AttentionCase {
  Tensor q, k, v, grad;
  KeyRanges visible;
  std::vector<Tensor> inputs() const { return {q, k, v}; }
};

inline AttentionCase random_case(const KeyRanges& visible, int64_t n_heads, int64_t n_key_heads, at::ScalarType dtype,
                                 int64_t d = 12, int64_t d_v = 8) {
  const auto leaf = [&](int64_t tokens, int64_t heads, int64_t columns, const char* name) {
    return seeded_normal({visible.batch(), tokens, heads, columns}, 1, kAttentionSeed, name, dtype).requires_grad_();
  };
  return {leaf(visible.n_queries(), n_heads, d, "q"), leaf(visible.n_keys(), n_key_heads, d, "k"),
          leaf(visible.n_keys(), n_key_heads, d_v, "v"), leaf(visible.n_queries(), n_heads, d_v, "grad").detach(),
          visible};
}

struct AttentionGradients {
  Tensor out;
  std::vector<Tensor> grads;
};

inline AttentionGradients run(AttentionKernel kernel, const AttentionCase& c) {
  const Tensor out = kernel(c.q, c.k, c.v, c.visible, kScale);
  return {out.detach(), torch::autograd::grad({out}, c.inputs(), {c.grad})};
}

// body() gives the same bits on any number of threads.
template <typename Body>
void expect_same_bits_on_threads(const Body& body) {
  const auto on_threads = [&](int threads) {
    const ThreadCount count(threads);
    return body();
  };
  const AttentionGradients once = on_threads(1);
  for (const int threads : {1, 2, 3}) {
    const AttentionGradients again = on_threads(threads);
    EXPECT_TRUE(once.out.equal(again.out)) << threads;
    for (size_t i = 0; i < once.grads.size(); ++i) {
      EXPECT_TRUE(once.grads[i].equal(again.grads[i])) << threads << " input " << i;
    }
  }
}

// The definition in fp64 under torch's own autograd.
inline AttentionGradients exact(const AttentionCase& c) {
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

// What rows of gradients are held against. The fused kernel's backward pass works from the output it saved: rounded to
// 16 bits, that puts an error of u |out . grad_out| into every score's gradient, however small the gradient itself is
// (0 where a query sees one key), so such rows are held against the largest element.
inline Scale gradient_scale(const Tensor& want, at::ScalarType dtype, bool from_saved_out) {
  Scale scale = scale_of(want);
  if (from_saved_out && c10::elementSize(dtype) == 2) scale.rms = scale.max;
  return scale;
}

// Scores, softmax and the weighted sum; backward the probabilities' gradient, theirs through softmax and the products.
inline void expect_exact(AttentionKernel kernel, const AttentionCase& c, bool from_saved_out = false) {
  const at::ScalarType dtype = c.q.scalar_type();
  const int64_t terms = std::max(c.visible.n_keys(), c.visible.n_queries()) * c.q.size(2);
  const AttentionGradients got = run(kernel, c), want = exact(c);
  EXPECT_EQ(got.out.scalar_type(), dtype);
  EXPECT_CLOSE(got.out, want.out, Tolerance::rounding(dtype, terms, 3));
  for (size_t i = 0; i < 3; ++i) {
    const Comparison compared = compare(got.grads[i], want.grads[i], Tolerance::rounding(dtype, terms, 5),
                                        gradient_scale(want.grads[i], dtype, from_saved_out));
    EXPECT_TRUE(compared.close) << "gradient of "
                                << "qkv"[i] << ": " << compared.text();
  }
}

}  // namespace parlat
