#include "parlat/kernels/fused_passes.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>

#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/block_product.h"
#include "parlat/kernels/device_passes.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/scratch.h"
#include "parlat/kernels/softmax_rows.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

// Tokens a block of out . grad_out: all heads of DeepSeek-V3's are 2 MB of fp32.
constexpr int64_t kAlongTokens = 32;

// The part of a within b; an empty one lies within b, too.
Range common(Range a, Range b) {
  const int64_t begin = std::clamp(a.begin, b.begin, b.end);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// Calls body(h) for all heads, on the threads that this rank has; heads begin in increasing order.
template <typename Body>
void for_each_head(int64_t n_heads, const KeySource& keys, const Body& body) {
  const at::ThreadLocalState caller;  // its memory meter counts what the other threads allocate
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, std::min<int64_t>(n_heads, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    const at::ThreadLocalStateGuard as_caller(caller);
    const at::NoGradGuard no_grad;
    try {
      for (int64_t h = next++; h < n_heads; h = next++) body(h);
    } catch (...) {
      keys.abandon();
      throw;
    }
  });
}

bool any_sees(const FusedQuery& in, int64_t b, Range keys) {
  for (int64_t query = 0; query < in.visible.n_queries(); ++query) {
    if (common(in.visible.row(b, query), keys).size() > 0) return true;
  }
  return false;
}

// Calls body(keys) for blocks of the keys that any query of sequence b sees. Blocks work in room that exists already,
// so without values (on the meta device) there is nothing to do.
template <typename Body>
void for_each_key_block(const FusedQuery& in, int64_t b, const Body& body) {
  if (in.q_BSHd.is_meta()) return;
  const Range seen = in.visible.hull(b, {0, in.visible.n_queries()});
  for (int64_t begin = seen.begin / kFusedKeys * kFusedKeys; begin < seen.end; begin += kFusedKeys) {
    const Range keys = common({begin, begin + kFusedKeys}, seen);
    if (any_sees(in, b, keys)) body(keys);
  }
}

// Calls body(queries, keys) for blocks of queries, keys being the part of `block` that any of them sees.
template <typename Body>
void for_each_query_block(const FusedQuery& in, int64_t b, Range block, const Body& body) {
  const int64_t n = in.visible.n_queries();
  for (int64_t begin = 0; begin < n; begin += kFusedQueries) {
    const Range queries{begin, std::min(begin + kFusedQueries, n)}, keys = common(in.visible.hull(b, queries), block);
    if (keys.size() > 0) body(queries, keys);
  }
}

// The keys that a query sees, counted from first_key on.
Range seen_from(const FusedQuery& in, int64_t b, int64_t query, Range keys) {
  const Range seen = common(in.visible.row(b, query), keys);
  return {seen.begin - keys.begin, seen.end - keys.begin};
}

template <typename T>
void scale_row(T* row, int64_t n, T factor) {
  for (int64_t i = 0; i < n; ++i) row[i] *= factor;
}

// Row r of an operand of products that softmax_rows writes; null where scores are operands as they are.
uint16_t* bf16_row(const Tensor& operand, int64_t r) {
  if (operand.scalar_type() != at::kBFloat16) return nullptr;
  return static_cast<uint16_t*>(operand.mutable_data_ptr()) + r * operand.stride(0);
}

// Room of one task, reused from block to block.
struct Room {
  Room(const FusedQuery& in, int64_t d_v)
      : q(kFusedQueries * in.q_BSHd.size(3), block_options(in.q_BSHd)),
        grad_out(kFusedQueries * d_v, block_options(in.q_BSHd)),
        scores(kFusedQueries * kFusedKeys, compute_options(in.q_BSHd)),
        grad_scores(kFusedQueries * kFusedKeys, compute_options(in.q_BSHd)),
        rounded(rounded_size(in.q_BSHd, kFusedQueries * kFusedKeys), block_options(in.q_BSHd)),
        rounded_grad(rounded_size(in.q_BSHd, kFusedQueries * kFusedKeys), block_options(in.q_BSHd)) {}
  // What is an operand of products where `x` in scratch isn't.
  static Tensor operand(const Scratch& rounded, const Tensor& x) {
    return rounded.dtype() == x.scalar_type() ? x : rounded.matrix(x.size(0), x.size(1));
  }
  Scratch q, grad_out, scores, grad_scores;
  Scratch rounded, rounded_grad;  // probabilities and gradients of scores as operands of products
};

// The running softmax of one head's queries in one sequence.
template <typename T>
struct Running {
  Tensor sum_Sv;  // of exp(score - max) v
  std::vector<RunningSoftmax<T>> rows;
};

template <typename T>
Running<T> begin_running(const Tensor& out_Sv, const Tensor& lse_S, const at::TensorOptions& options, bool resume) {
  const int64_t n = out_Sv.size(0);
  Running<T> running{out_Sv.scalar_type() == options.dtype().toScalarType()
                         ? out_Sv
                         : metered("scratch", at::empty(out_Sv.sizes(), options)),
                     std::vector<RunningSoftmax<T>>(n)};
  if (!resume || out_Sv.is_meta()) {
    running.sum_Sv.zero_();
    return running;
  }
  const auto lse = lse_S.accessor<T, 1>();
  for (int64_t s = 0; s < n; ++s) {
    if (lse[s] != -std::numeric_limits<T>::infinity()) running.rows[s] = {.max = lse[s], .sum = 1, .weight = 1};
  }
  return running;
}

template <typename T>
void finish_running(const FusedQuery& in, int64_t b, Running<T>& running, const Tensor& out_Sv, const Tensor& lse_S) {
  if (out_Sv.is_meta()) return;
  auto lse = lse_S.accessor<T, 1>();
  auto sum = running.sum_Sv.template accessor<T, 2>();
  for (int64_t s = 0; s < out_Sv.size(0); ++s) {
    RunningSoftmax<T>& row = running.rows[s];
    // Keys that all score -inf have no softmax.
    if (row.sum == 0 && in.visible.row(b, s).size() > 0) row.sum = row.weight = std::numeric_limits<T>::quiet_NaN();
    const bool any = row.sum != 0;
    if (any) scale_row(&sum[s][0], sum.size(1), 1 / row.weight);
    lse[s] = any ? row.max + std::log(row.sum) : -std::numeric_limits<T>::infinity();
  }
  if (!running.sum_Sv.is_same(out_Sv)) out_Sv.copy_(running.sum_Sv);
}

template <typename T>
void join_block(const FusedQuery& in, int64_t b, Range queries, Range keys, const Tensor& scores, const Tensor& p,
                Running<T>& running) {
  T* row = scores.mutable_data_ptr<T>();
  auto sum = running.sum_Sv.template accessor<T, 2>();
  for (int64_t s = queries.begin; s < queries.end; ++s, row += keys.size()) {
    const T shrink =
        join_softmax_row(row, keys.size(), seen_from(in, b, s, keys), running.rows[s], bf16_row(p, s - queries.begin));
    if (shrink != 1) scale_row(&sum[s][0], sum.size(1), shrink);
  }
}

template <typename T>
void forward_head(const FusedQuery& in, int64_t b, int64_t h, HeadKeys& head, const Room& room, const Tensor& out_Sv,
                  const Tensor& lse_S, bool resume) {
  const Tensor q_Sd = one_head(in.q_BSHd, b, h);
  Running<T> running = begin_running<T>(out_Sv, lse_S, compute_options(q_Sd), resume);
  for_each_key_block(in, b, [&](Range block) {
    const KeyBlock loaded = head.load(b, block);
    for_each_query_block(in, b, block, [&](Range queries, Range keys) {
      const Range local{keys.begin - block.begin, keys.end - block.begin};
      const Tensor scores = room.scores.matrix(queries.size(), keys.size());
      multiply(room.q.converted(rows(q_Sd, queries)), rows(loaded.k, local).t(), scores, in.scale);
      const Tensor p = Room::operand(room.rounded, scores);
      join_block<T>(in, b, queries, keys, scores, p, running);
      accumulate(p, rows(loaded.v, local), rows(running.sum_Sv, queries));
    });
  });
  finish_running<T>(in, b, running, out_Sv, lse_S);
}

// What the backward pass of one head needs of its queries.
struct HeadGradients {
  Tensor lse_S, along_S;          // along: out . grad_out
  Tensor grad_out_Sv, grad_q_Sd;  // grad_q in the dtype of the arithmetic
  bool parts;                     // other keys were seen, too
};

template <typename T>
void regain_block(const FusedQuery& in, int64_t b, Range queries, Range keys, const Tensor& scores,
                  const Tensor& grad_scores, const Tensor& p, const Tensor& grad, const HeadGradients& g) {
  const auto lse = g.lse_S.accessor<T, 1>(), along = g.along_S.accessor<T, 1>();
  T* row = scores.mutable_data_ptr<T>();
  T* grad_row = grad_scores.mutable_data_ptr<T>();
  for (int64_t s = queries.begin; s < queries.end; ++s, row += keys.size(), grad_row += keys.size()) {
    const Range seen = seen_from(in, b, s, keys);
    const bool whole = !g.parts && seen.size() == in.visible.row(b, s).size();
    const int64_t r = s - queries.begin;
    regain_softmax_row(row, grad_row, keys.size(), seen, whole, lse[s], along[s], static_cast<T>(in.scale),
                       bf16_row(p, r), bf16_row(grad, r));
  }
}

template <typename T>
void backward_head(const FusedQuery& in, int64_t b, int64_t h, HeadKeys& head, const Room& room,
                   const HeadGradients& g) {
  const Tensor q_Sd = one_head(in.q_BSHd, b, h);
  const int64_t d = q_Sd.size(1), d_v = g.grad_out_Sv.size(1);
  const Scratch k_room(kFusedKeys * d, compute_options(q_Sd)), v_room(kFusedKeys * d_v, compute_options(q_Sd));
  for_each_key_block(in, b, [&](Range block) {
    const KeyBlock loaded = head.load(b, block);
    const KeyBlock grads{k_room.matrix(block.size(), d).zero_(), v_room.matrix(block.size(), d_v).zero_()};
    for_each_query_block(in, b, block, [&](Range queries, Range keys) {
      const Range local{keys.begin - block.begin, keys.end - block.begin};
      const Tensor q = room.q.converted(rows(q_Sd, queries));
      const Tensor grad_out = room.grad_out.converted(rows(g.grad_out_Sv, queries));
      const Tensor scores = room.scores.matrix(queries.size(), keys.size());
      const Tensor grad_scores = room.grad_scores.matrix(queries.size(), keys.size());
      multiply(q, rows(loaded.k, local).t(), scores, in.scale);
      multiply(grad_out, rows(loaded.v, local).t(), grad_scores);
      const Tensor p = Room::operand(room.rounded, scores), grad = Room::operand(room.rounded_grad, grad_scores);
      regain_block<T>(in, b, queries, keys, scores, grad_scores, p, grad, g);
      accumulate(p.t(), grad_out, rows(grads.v, local));
      accumulate(grad.t(), q, rows(grads.k, local));
      accumulate(grad, rows(loaded.k, local), rows(g.grad_q_Sd, queries));
    });
    head.add_gradients(b, block, grads);
  });
}

}  // namespace

void fused_forward(const FusedQuery& query, const KeySource& keys, const Tensor& out_BSHv, const Tensor& lse_BSH,
                   bool resume) {
  const Tensor& q = query.q_BSHd;
  if (!q.is_cpu() && !q.is_meta()) return device_forward(query, keys, out_BSHv, lse_BSH, resume);
  for_each_head(q.size(2), keys, [&](int64_t h) {
    const auto head = keys.head(h);
    const Room room(query, keys.d_v());
    for (int64_t b = 0; b < q.size(0); ++b) {
      AT_DISPATCH_FLOATING_TYPES(compute_dtype(q.scalar_type()), "fused_forward", [&] {
        forward_head<scalar_t>(query, b, h, *head, room, one_head(out_BSHv, b, h), lse_BSH.select(0, b).select(1, h),
                               resume);
      });
    }
  });
}

Tensor out_along_gradient(const Tensor& out_BSHv, const Tensor& grad_out_BSHv) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions options = compute_options(out_BSHv);
  const at::ScalarType compute = options.dtype().toScalarType();
  const Tensor along_BSH = metered("lse", at::empty(out_BSHv.sizes().slice(0, 3), options));
  const int64_t tokens = out_BSHv.size(1);
  for (int64_t b = 0; b < out_BSHv.size(0); ++b) {
    for (int64_t begin = 0; begin < tokens; begin += kAlongTokens) {
      const Range block{begin, std::min(begin + kAlongTokens, tokens)};
      const Tensor out = widened(rows(out_BSHv.select(0, b), block), compute);
      const Tensor grad_out = widened(rows(grad_out_BSHv.select(0, b), block), compute);
      rows(along_BSH.select(0, b), block).copy_(metered("scratch", out * grad_out).sum(-1));
    }
  }
  return along_BSH;
}

void fused_backward(const FusedQuery& query, const KeySource& keys, const Tensor& along_BSH, const Tensor& lse_BSH,
                    const Tensor& grad_out_BSHv, const QueryGradient& grad_q, bool parts) {
  const Tensor& q = query.q_BSHd;
  if (!q.is_cpu() && !q.is_meta()) {
    return device_backward(query, keys, along_BSH, lse_BSH, grad_out_BSHv, grad_q, parts);
  }
  const at::ScalarType compute = compute_dtype(q.scalar_type());
  for_each_head(q.size(2), keys, [&](int64_t h) {
    const auto head = keys.head(h);
    const Room room(query, keys.d_v());
    for (int64_t b = 0; b < q.size(0); ++b) {
      const HeadGradients g{lse_BSH.select(0, b).select(1, h), along_BSH.select(0, b).select(1, h),
                            one_head(grad_out_BSHv, b, h), grad_q.open(b, h), parts};
      AT_DISPATCH_FLOATING_TYPES(compute, "fused_backward",
                                 [&] { backward_head<scalar_t>(query, b, h, *head, room, g); });
      grad_q.close(b, h, g.grad_q_Sd);
    }
    head->finish();
  });
}

}  // namespace parlat
