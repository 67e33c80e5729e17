#include "parlat/bench/layer_case.h"

#include <ATen/ops/empty.h>

#include "parlat/base/memory_limit.h"
#include "parlat/decode/cache_size.h"
#include "parlat/tensor/fill.h"

namespace parlat {

namespace {

std::vector<int64_t> even_lengths(int64_t sequence, int64_t documents) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < documents; ++i) {
    if (const int64_t length = even_share(sequence, documents, i).size(); length > 0) lengths.push_back(length);
  }
  return lengths;
}

}  // namespace

SequenceShards LayerCase::shards(int ranks) const { return shard_sequence(sharding, sequence(), ranks); }

LayerCase make_layer_case(MlaWeights weights, const LayerCaseShape& shape) {
  require_memory_for_tokens(static_cast<double>(shape.batch) * static_cast<double>(shape.sequence), 1);
  const std::vector<int64_t> size = {shape.batch, shape.sequence, weights.dims().d_model};
  const at::TensorOptions options = weights.w_o.options();
  const auto values = [&](const char* name) {
    if (options.device().is_meta()) return at::empty(size, options);
    return seeded_normal(size, 1.0, shape.seed, name, options.dtype().toScalarType());
  };
  const std::vector<std::vector<int64_t>> lengths(shape.batch, even_lengths(shape.sequence, shape.documents));
  return {.weights = std::move(weights),
          .x_BSD = values("x"),
          .grad_out_BSD = values("grad_out"),
          .documents = Documents::packed(shape.sequence, lengths),
          .sharding = shape.sharding};
}

std::vector<std::pair<std::string, Tensor>> RankLayer::leaves() const {
  auto leaves = named_weights(weights);
  leaves.emplace_back("x", x_BSD);
  return leaves;
}

RankLayer rank_layer(const LayerCase& layer, bool requires_grad, const Communicator& comm) {
  const double tokens = static_cast<double>(layer.documents.batch()) * static_cast<double>(layer.sequence());
  require_memory_for_tokens(tokens, ranks_here(comm));
  const SequenceShards shards = layer.shards(comm.size());
  // fp64 is held to what fp64 can do: a table in fp32 would be the largest error by far.
  const at::ScalarType rope = layer.weights.w_o.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  RankLayer local{
      .weights = layer.weights,
      .x_BSD = local_tokens(layer.x_BSD, shards, comm.rank()),
      .grad_out_BSD = local_tokens(layer.grad_out_BSD, shards, comm.rank()),
      .tokens = make_token_shard(layer.weights.spec, layer.documents, shards, comm.rank(), /*causal=*/true, rope),
  };
  MlaWeights& w = local.weights;
  for (Tensor* leaf : {&w.w_dq, &w.q_norm, &w.w_uq, &w.w_dkv, &w.kv_norm, &w.w_ukv, &w.w_o, &local.x_BSD}) {
    if (leaf->defined()) *leaf = leaf->detach().requires_grad_(requires_grad);
  }
  return local;
}

}  // namespace parlat
