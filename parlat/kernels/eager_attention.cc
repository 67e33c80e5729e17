#include "parlat/kernels/eager_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/block_product.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/kernels/scratch.h"
#include "parlat/kernels/softmax_rows.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

struct Operands {
  const Tensor &q_BSHd, &k_BTKd, &v_BTKv;
  const KeyRanges& visible;
  double scale;
  int64_t n_queries() const { return q_BSHd.size(1); }
  int64_t n_keys() const { return k_BTKd.size(1); }
  int64_t n_heads() const { return q_BSHd.size(2); }
  int64_t d_qk() const { return q_BSHd.size(3); }
  int64_t d_v() const { return v_BTKv.size(3); }
  // Heads that share a key.
  int64_t heads_per_key() const { return n_heads() / std::max<int64_t>(1, k_BTKd.size(2)); }
};

Tensor probabilities(const Tensor& p_BHST, int64_t b, int64_t h, Range queries, Range keys) {
  return rows(p_BHST.select(0, b).select(0, h), queries).narrow(1, keys.begin, keys.size());
}

Scratch scratch(const Operands& in, int64_t n_rows, int64_t n_columns) {
  return Scratch(n_rows * n_columns, compute_options(in.q_BSHd));
}

// Rows of scores become probabilities; columns are the keys from first_key on.
template <typename T>
void softmax_block(const Tensor& scores, const KeyRanges& visible, int64_t b, Range queries, int64_t first_key) {
  T* row = scores.mutable_data_ptr<T>();
  for (int64_t query = queries.begin; query < queries.end; ++query, row += scores.stride(0)) {
    const Range& keys = visible.row(b, query);
    const bool any = keys.size() > 0;
    softmax_row(row, scores.size(1), {any ? keys.begin - first_key : 0, any ? keys.end - first_key : 0});
  }
}

template <typename T>
void softmax_block_backward(const Tensor& p, const Tensor& grad, double scale) {
  const T* p_row = p.const_data_ptr<T>();
  T* grad_row = grad.mutable_data_ptr<T>();
  for (int64_t i = 0; i < p.size(0); ++i, p_row += p.stride(0), grad_row += grad.stride(0)) {
    softmax_row_backward(p_row, grad_row, p.size(1), static_cast<T>(scale));
  }
}

// Calls body(queries, keys) for blocks of queries, keys being all that any of them may see. Blocks work in room that
// exists already, so without values (on the meta device) there is nothing to do.
template <typename Body>
void for_each_block(const Operands& in, int64_t b, const Body& body) {
  if (in.q_BSHd.is_meta()) return;
  for (int64_t begin = 0; begin < in.n_queries(); begin += kEagerBlockRows) {
    const Range queries{begin, std::min(begin + kEagerBlockRows, in.n_queries())};
    body(queries, in.visible.hull(b, queries));
  }
}

// Calls body(b, key head) for all, on the threads that this rank has.
template <typename Body>
void for_each_key_head(const Operands& in, const Body& body) {
  const int64_t n_key_heads = in.k_BTKd.size(2);
  const at::ThreadLocalState caller;  // its memory meter counts what the other threads allocate
  at::parallel_for(0, in.q_BSHd.size(0) * n_key_heads, 1, [&](int64_t begin, int64_t end) {
    const at::ThreadLocalStateGuard as_caller(caller);
    const at::NoGradGuard no_grad;
    for (int64_t i = begin; i < end; ++i) body(i / n_key_heads, i % n_key_heads);
  });
}

// Writes only the probabilities of blocks' visible keys, the backward pass reads no others; none if p is undefined.
template <typename T>
void forward_key_head(const Operands& in, int64_t b, int64_t key_head, const Tensor& p_BHST, const Tensor& out_BSHv) {
  const int64_t block = std::min(kEagerBlockRows, in.n_queries());
  const Scratch k_room = scratch(in, in.n_keys(), in.d_qk()), v_room = scratch(in, in.n_keys(), in.d_v());
  const Scratch q_room = scratch(in, block, in.d_qk()), out_room = scratch(in, block, in.d_v());
  const Scratch score_room = scratch(in, block, in.n_keys());
  const Tensor k = k_room.converted(one_head(in.k_BTKd, b, key_head));
  const Tensor v = v_room.converted(one_head(in.v_BTKv, b, key_head));
  for (int64_t h = key_head * in.heads_per_key(); h < (key_head + 1) * in.heads_per_key(); ++h) {
    const Tensor q = one_head(in.q_BSHd, b, h), out = one_head(out_BSHv, b, h);
    for_each_block(in, b, [&](Range queries, Range keys) {
      const Tensor out_block = rows(out, queries);
      if (keys.size() == 0) {
        out_block.zero_();
        return;
      }
      const Tensor scores = score_room.matrix(queries.size(), keys.size());
      multiply(q_room.converted(rows(q, queries)), rows(k, keys).t(), scores, in.scale);
      softmax_block<T>(scores, in.visible, b, queries, keys.begin);
      if (p_BHST.defined()) probabilities(p_BHST, b, h, queries, keys).copy_(scores);
      const Tensor sum = out_room.matrix(queries.size(), in.d_v());
      multiply(scores, rows(v, keys), sum);
      out_block.copy_(sum);
    });
  }
}

struct Gradients {
  Tensor q_BSHd, k_BTKd, v_BTKv;
};

template <typename T>
void backward_key_head(const Operands& in, int64_t b, int64_t key_head, const Tensor& p_BHST,
                       const Tensor& grad_out_BSHv, const Gradients& grads) {
  const int64_t block = std::min(kEagerBlockRows, in.n_queries());
  const Scratch k_room = scratch(in, in.n_keys(), in.d_qk()), v_room = scratch(in, in.n_keys(), in.d_v());
  const Scratch q_room = scratch(in, block, in.d_qk()), grad_out_room = scratch(in, block, in.d_v());
  const Scratch p_room = scratch(in, block, in.n_keys()), score_room = scratch(in, block, in.n_keys());
  const Scratch grad_q_room = scratch(in, block, in.d_qk());
  const Tensor grad_k = metered("scratch", at::zeros({in.n_keys(), in.d_qk()}, compute_options(in.q_BSHd)));
  const Tensor grad_v = metered("scratch", at::zeros({in.n_keys(), in.d_v()}, compute_options(in.q_BSHd)));
  const Tensor k = k_room.converted(one_head(in.k_BTKd, b, key_head));
  const Tensor v = v_room.converted(one_head(in.v_BTKv, b, key_head));
  for (int64_t h = key_head * in.heads_per_key(); h < (key_head + 1) * in.heads_per_key(); ++h) {
    for_each_block(in, b, [&](Range queries, Range keys) {
      const Tensor grad_q_block = rows(one_head(grads.q_BSHd, b, h), queries);
      if (keys.size() == 0) {
        grad_q_block.zero_();
        return;
      }
      const Tensor q = q_room.converted(rows(one_head(in.q_BSHd, b, h), queries));
      const Tensor grad_out = grad_out_room.converted(rows(one_head(grad_out_BSHv, b, h), queries));
      const Tensor p = p_room.converted(probabilities(p_BHST, b, h, queries, keys));
      accumulate(p.t(), grad_out, rows(grad_v, keys));
      const Tensor grad_scores = score_room.matrix(queries.size(), keys.size());
      multiply(grad_out, rows(v, keys).t(), grad_scores);
      softmax_block_backward<T>(p, grad_scores, in.scale);
      accumulate(grad_scores.t(), q, rows(grad_k, keys));
      const Tensor grad_q = grad_q_room.matrix(queries.size(), in.d_qk());
      multiply(grad_scores, rows(k, keys), grad_q);
      grad_q_block.copy_(grad_q);
    });
  }
  one_head(grads.k_BTKd, b, key_head).copy_(grad_k);
  one_head(grads.v_BTKv, b, key_head).copy_(grad_v);
}

Tensor attend(const Operands& in, const Tensor& p_BHST) {
  const Tensor& q = in.q_BSHd;
  const Tensor out = metered("out", at::empty({q.size(0), in.n_queries(), in.n_heads(), in.d_v()}, q.options()));
  for_each_key_head(in, [&](int64_t b, int64_t key_head) {
    AT_DISPATCH_FLOATING_TYPES(compute_dtype(q.scalar_type()), "eager_attention",
                               [&] { forward_key_head<scalar_t>(in, b, key_head, p_BHST, out); });
  });
  return out;
}

class EagerAttention : public torch::autograd::Function<EagerAttention> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const KeyRanges& visible, double scale) {
    const Operands in{q, k, v, visible, scale};
    const Tensor p =
        metered("probabilities", at::empty({q.size(0), in.n_heads(), in.n_queries(), in.n_keys()}, q.options()));
    const Tensor out = attend(in, p);
    save_attention(ctx, {q, k, v, p}, visible, scale);
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad) {
    refuse_second_gradients("eager attention");
    const auto saved = ctx->get_saved_variables();
    const Operands in{saved[0], saved[1], saved[2], saved_ranges(ctx), saved_scale(ctx)};
    const auto gradient_of = [](const char* what, const Tensor& x) {
      return metered(what, at::empty(x.sizes(), x.options()));
    };
    const Gradients grads{gradient_of("query gradient", saved[0]), gradient_of("key gradient", saved[1]),
                          gradient_of("value gradient", saved[2])};
    for_each_key_head(in, [&](int64_t b, int64_t key_head) {
      AT_DISPATCH_FLOATING_TYPES(compute_dtype(saved[0].scalar_type()), "eager_attention_backward",
                                 [&] { backward_key_head<scalar_t>(in, b, key_head, saved[3], grad[0], grads); });
    });
    return {grads.q_BSHd, grads.k_BTKd, grads.v_BTKv, {}, {}};
  }
};

}  // namespace

Tensor eager_attention(const Tensor& q_BSHd, const Tensor& k_BTKd, const Tensor& v_BTKv, const KeyRanges& visible,
                       double softmax_scale) {
  check_attention(q_BSHd, k_BTKd, v_BTKv, visible);
  if (!differentiable({q_BSHd, k_BTKd, v_BTKv})) {
    return attend({q_BSHd, k_BTKd, v_BTKv, visible, softmax_scale}, Tensor());
  }
  return EagerAttention::apply(q_BSHd, k_BTKd, v_BTKv, visible, softmax_scale);
}

}  // namespace parlat
