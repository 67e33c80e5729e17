#pragma once

#include <ATen/ATen.h>

#include <map>
#include <mutex>
#include <string>

#include "parlat/mla/oracle.h"
#include "parlat/tensor/fill.h"
#include "parlat/train/forms.h"
#include "tests/run_ranks.h"
#include "tests/shard_indices.h"

namespace parlat {

inline constexpr uint64_t kSeed = 20260717;

// One attention layer with its input, the gradient of its output, and how the sequences are packed.
struct FormCase {
  MlaSpec spec;
  MlaWeights weights;
  Tensor x_BSD, grad_out_BSD;
  Documents documents;
  bool causal = true;
};

struct FormCaseShape {
  int64_t d_model = 48, n_heads = 7;
  std::optional<int64_t> d_q_latent = 40;
  int64_t batch = 2, sequence = 29;
  bool packed = true;
  bool causal = true;
  at::ScalarType dtype = at::kFloat;
};

inline Documents case_documents(const FormCaseShape& shape) {
  const int64_t s = shape.sequence;
  if (!shape.packed || s < 6) return Documents::whole(shape.batch, s);
  // Sequences differ: documents of one token, of a few, and the rest.
  std::vector<std::vector<int64_t>> lengths;
  for (int64_t b = 0; b < shape.batch; ++b)
    lengths.push_back(b % 2 == 0 ? std::vector<int64_t>{1, 4, s - 5} : std::vector<int64_t>{s - 3, 3});
  return Documents::packed(s, lengths);
}

inline FormCase make_form_case(const FormCaseShape& shape) {
  MlaSpec spec;
  spec.dims = {.d_model = shape.d_model,
               .n_heads = shape.n_heads,
               .d_nope = 16,
               .d_rope = 8,
               .d_v = 16,
               .d_latent = 32,
               .d_q_latent = shape.d_q_latent};
  const std::vector<int64_t> size = {shape.batch, shape.sequence, shape.d_model};
  return {.spec = spec,
          .weights = random_mla_weights(spec, kSeed, shape.dtype),
          .x_BSD = seeded_normal(size, 1.0, kSeed, "x", shape.dtype),
          .grad_out_BSD = seeded_normal(size, 1.0, kSeed, "grad_out", shape.dtype),
          .documents = case_documents(shape),
          .causal = shape.causal};
}

inline OracleResult oracle(const FormCase& c) {
  return oracle_forward_backward(c.weights, c.x_BSD, c.grad_out_BSD, c.documents, c.causal);
}

// The same weights as leaves of this rank's graph.
inline MlaWeights trainable_copy(const MlaWeights& w) {
  MlaWeights copy = w;
  for (Tensor* t : {&copy.w_dq, &copy.q_norm, &copy.w_uq, &copy.w_dkv, &copy.kv_norm, &copy.w_ukv, &copy.w_o}) {
    if (t->defined()) *t = t->detach().clone().requires_grad_();
  }
  return copy;
}

// Runs the form on `ranks` ranks and puts the pieces together: out and the gradient of x in global order, gradients of
// weights summed over ranks in fp64.
inline OracleResult run_form(TrainForm form, const FormCase& c, int ranks, Sharding sharding = Sharding::kContiguous,
                             AttentionOptions options = {}) {
  OracleResult result;
  result.out = at::zeros(c.x_BSD.sizes(), at::kDouble);
  result.gradients["x"] = at::zeros(c.x_BSD.sizes(), at::kDouble);
  std::vector<std::map<std::string, Tensor>> by_rank(ranks);
  std::mutex mutex;
  run_ranks(ranks, [&](Communicator& comm) {
    const SequenceShards shards = shard_sequence(sharding, c.x_BSD.size(1), comm.size());
    const TokenShard tokens = make_token_shard(c.spec, c.documents, shards, comm.rank(), c.causal);
    const MlaWeights w = trainable_copy(c.weights);
    const Tensor x = local_tokens(c.x_BSD, shards, comm.rank()).clone().requires_grad_();
    const Tensor out = make_attention(form, comm, c.spec.dims, options)->forward(w, x, tokens);
    out.backward(local_tokens(c.grad_out_BSD, shards, comm.rank()).clone());

    const std::lock_guard lock(mutex);
    const Tensor index = shard_indices(shards, comm.rank());
    result.out.index_copy_(1, index, out.detach().to(at::kDouble));
    result.gradients["x"].index_copy_(1, index, x.grad().to(at::kDouble));
    for (const auto& [name, weight] : named_weights(w)) by_rank[comm.rank()][name] = weight.grad().to(at::kDouble);
  });
  for (const auto& gradients : by_rank) {
    for (const auto& [name, gradient] : gradients) {
      Tensor& sum = result.gradients[name];
      sum = sum.defined() ? sum + gradient : gradient;
    }
  }
  return result;
}

}  // namespace parlat
