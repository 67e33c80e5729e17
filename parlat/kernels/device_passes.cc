#include "parlat/kernels/device_passes.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <limits>

#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/gemm.h"

namespace parlat {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A block of keys, and the smallest interval of queries that holds all who see any of it.
struct Block {
  Range keys, queries;
};

// What the queries of one sequence see, on their device.
struct Sight {
  Sight(const FusedQuery& in, int64_t b) {
    const int64_t n = in.visible.n_queries();
    std::vector<int64_t> begins, ends;
    for (int64_t s = 0; s < n; ++s) {
      begins.push_back(in.visible.row(b, s).begin);
      ends.push_back(in.visible.row(b, s).end);
    }
    begin_S = at::tensor(begins, at::kLong).to(in.q_BSHd.device());
    end_S = at::tensor(ends, at::kLong).to(in.q_BSHd.device());
    for (int64_t first = 0; first < in.visible.n_keys(); first += kFusedKeys) {
      Block block{{first, std::min(first + kFusedKeys, in.visible.n_keys())}, {n, 0}};
      for (int64_t s = 0; s < n; ++s) {
        if (std::max(begins[s], block.keys.begin) >= std::min(ends[s], block.keys.end)) continue;
        block.queries = {std::min(block.queries.begin, s), s + 1};
      }
      if (block.queries.size() > 0) blocks.push_back(block);
    }
  }

  // [queries, keys]: which keys a query does not see.
  Tensor hidden(const Block& block) const {
    const Tensor keys = at::arange(block.keys.begin, block.keys.end, begin_S.options()).unsqueeze(0);
    return (keys < rows(begin_S, block.queries).unsqueeze(1))
        .logical_or_(keys >= rows(end_S, block.queries).unsqueeze(1));
  }
  // [queries]: who sees no other keys than some of these.
  Tensor nothing_else(const Block& block) const {
    return (rows(begin_S, block.queries) >= block.keys.begin)
        .logical_and_(rows(end_S, block.queries) <= block.keys.end);
  }

  Tensor begin_S, end_S;
  std::vector<Block> blocks;
};

// In the dtype of the arithmetic, whatever the kernel's products would take.
KeyBlock load(HeadKeys& head, int64_t b, Range keys, at::ScalarType compute) {
  const KeyBlock loaded = head.load(b, keys);
  return {loaded.k.to(compute), loaded.v.to(compute)};
}

Tensor scores_of(const Tensor& q_Sd, const Tensor& k_Td, double scale) { return at::mm(q_Sd, k_Td.t()).mul_(scale); }

// Calls body(b, h, head, sight) for all.
template <typename Body>
void for_each_head(const FusedQuery& in, const KeySource& keys, const Body& body) {
  const at::NoGradGuard no_grad;
  std::vector<Sight> sights;
  for (int64_t b = 0; b < in.visible.batch(); ++b) sights.emplace_back(in, b);
  for (int64_t h = 0; h < in.q_BSHd.size(2); ++h) {
    const auto head = keys.head(h);
    for (int64_t b = 0; b < in.visible.batch(); ++b) body(b, h, *head, sights[b]);
  }
}

}  // namespace

void device_forward(const FusedQuery& in, const KeySource& keys, const Tensor& out_BSHv, const Tensor& lse_BSH,
                    bool resume) {
  const at::ScalarType compute = compute_dtype(in.q_BSHd.scalar_type());
  for_each_head(in, keys, [&](int64_t b, int64_t h, HeadKeys& head, const Sight& sight) {
    const Tensor q = one_head(in.q_BSHd, b, h).to(compute);
    const Tensor out = one_head(out_BSHv, b, h), lse = lse_BSH.select(0, b).select(1, h);
    // Of exp(score - max), and of that times v.
    const Tensor max = resume ? lse.clone() : at::full_like(lse, -kInfinity);
    const Tensor norm = max.isneginf().logical_not_().to(lse.scalar_type());
    const Tensor sum = resume ? out.clone() : at::zeros(out.sizes(), compute_options(in.q_BSHd));
    for (const Block& block : sight.blocks) {
      const KeyBlock loaded = load(head, b, block.keys, compute);
      Tensor p = scores_of(rows(q, block.queries), loaded.k, in.scale).masked_fill_(sight.hidden(block), -kInfinity);
      const Tensor old_max = rows(max, block.queries), new_max = at::maximum(old_max, p.amax(1));
      const Tensor finite = new_max.masked_fill(new_max.isneginf(), 0);
      p.sub_(finite.unsqueeze(1)).exp_();
      const Tensor shrink = (old_max - finite).exp_();
      old_max.copy_(new_max);
      rows(norm, block.queries).mul_(shrink).add_(p.sum(1));
      rows(sum, block.queries).mul_(shrink.unsqueeze(1)).addmm_(p, loaded.v);
    }
    // Keys that all score -inf have no softmax.
    norm.masked_fill_((norm == 0).logical_and_(sight.end_S > sight.begin_S), std::numeric_limits<double>::quiet_NaN());
    lse.copy_(max + norm.log());
    out.copy_(sum / norm.masked_fill(norm == 0, 1).unsqueeze(1));
  });
}

void device_backward(const FusedQuery& in, const KeySource& keys, const Tensor& along_BSH, const Tensor& lse_BSH,
                     const Tensor& grad_out_BSHv, const QueryGradient& sums, bool parts) {
  const at::ScalarType compute = compute_dtype(in.q_BSHd.scalar_type());
  for_each_head(in, keys, [&](int64_t b, int64_t h, HeadKeys& head, const Sight& sight) {
    const Tensor q = one_head(in.q_BSHd, b, h).to(compute), grad_out = one_head(grad_out_BSHv, b, h).to(compute);
    const Tensor lse = lse_BSH.select(0, b).select(1, h), along = along_BSH.select(0, b).select(1, h);
    const Tensor grad_q = sums.open(b, h);
    for (const Block& block : sight.blocks) {
      const KeyBlock loaded = load(head, b, block.keys, compute);
      const Tensor hidden = sight.hidden(block), q_block = rows(q, block.queries);
      const Tensor grad_out_block = rows(grad_out, block.queries);
      const Tensor p = scores_of(q_block, loaded.k, in.scale).sub_(rows(lse, block.queries).unsqueeze(1)).exp_();
      p.masked_fill_(hidden, 0);
      const Tensor grad = at::mm(grad_out_block, loaded.v.t()).masked_fill_(hidden, 0);
      // As in regain_softmax_row.
      Tensor along_block = rows(along, block.queries);
      if (!parts) along_block = at::where(sight.nothing_else(block), (p * grad).sum(1), along_block);
      grad.sub_(along_block.unsqueeze(1)).mul_(p).mul_(in.scale).masked_fill_(hidden.logical_or(p == 1), 0);
      rows(grad_q, block.queries).addmm_(grad, loaded.k);
      head.add_gradients(b, block.keys, {at::mm(grad.t(), q_block), at::mm(p.t(), grad_out_block)});
    }
    sums.close(b, h, grad_q);
    if (b + 1 == in.visible.batch()) head.finish();
  });
}

}  // namespace parlat
