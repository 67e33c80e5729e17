// Rounding errors of a gradient that went back through many layers do not grow with the number of ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "tests/train/form_case.h"

namespace parlat {
namespace {

constexpr int kLayers = 16;

struct Stack {
  FormCase first;
  std::vector<MlaWeights> weights;
};

Stack make_stack() {
  Stack stack{make_form_case({.n_heads = 4, .batch = 1, .sequence = 96, .packed = false, .dtype = at::kBFloat16}), {}};
  for (int layer = 0; layer < kLayers; ++layer) {
    stack.weights.push_back(random_mla_weights(stack.first.spec, kSeed + static_cast<uint64_t>(layer), at::kBFloat16));
  }
  return stack;
}

using Gradients = std::map<std::string, Tensor>;  // of x and of the first layer's weights, fp64

Gradients in_fp64(const Stack& stack) {
  const Tensor x = stack.first.x_BSD.to(at::kDouble).requires_grad_();
  MlaWeights first = trainable_copy(stack.weights[0]);
  for (Tensor* t : {&first.w_dq, &first.q_norm, &first.w_uq, &first.w_dkv, &first.kv_norm, &first.w_ukv, &first.w_o}) {
    *t = t->detach().to(at::kDouble).requires_grad_();
  }
  Tensor h = x;
  for (int layer = 0; layer < kLayers; ++layer) {
    h = h + oracle_attention(layer == 0 ? first : stack.weights[layer], h, stack.first.documents);
  }
  h.backward(stack.first.grad_out_BSD.to(at::kDouble));
  Gradients result{{"x", x.grad()}};
  for (const auto& [name, weight] : named_weights(first)) result[name] = weight.grad();
  return result;
}

Gradients over_ranks(const Stack& stack, TrainForm form, int ranks) {
  Gradients result{{"x", at::zeros(stack.first.x_BSD.sizes(), at::kDouble)}};
  std::vector<Gradients> by_rank(ranks);
  std::mutex mutex;
  run_ranks(ranks, [&](Communicator& comm) {
    const SequenceShards shards = shard_sequence(Sharding::kZigzag, stack.first.x_BSD.size(1), comm.size());
    const TokenShard tokens = make_token_shard(stack.first.spec, stack.first.documents, shards, comm.rank(), true);
    const auto attention = make_attention(form, comm, stack.first.spec.dims);
    const Tensor x = local_tokens(stack.first.x_BSD, shards, comm.rank()).clone().requires_grad_();
    std::vector<MlaWeights> weights;
    for (const MlaWeights& w : stack.weights) weights.push_back(trainable_copy(w));
    Tensor h = x;
    for (const MlaWeights& w : weights) h = h + attention->forward(w, h, tokens);
    h.backward(local_tokens(stack.first.grad_out_BSD, shards, comm.rank()).clone());
    const std::lock_guard lock(mutex);
    result["x"].index_copy_(1, shard_indices(shards, comm.rank()), x.grad().to(at::kDouble));
    for (const auto& [name, weight] : named_weights(weights[0]))
      by_rank[comm.rank()][name] = weight.grad().to(at::kDouble);
  });
  for (const Gradients& gradients : by_rank) {
    for (const auto& [name, gradient] : gradients) {
      result[name] = result[name].defined() ? result[name] + gradient : gradient;
    }
  }
  return result;
}

Gradients errors_of(const Gradients& got, const Gradients& want) {
  Gradients errors;
  for (const auto& [name, gradient] : want) errors[name] = (got.at(name) - gradient).norm() / gradient.norm();
  return errors;
}

class StackedLayers : public ::testing::TestWithParam<TrainForm> {};

TEST_P(StackedLayers, ErrorsOfBf16DoNotGrowWithRanks) {
  const Stack stack = make_stack();
  const Gradients want = in_fp64(stack), alone = errors_of(over_ranks(stack, GetParam(), 1), want);
  for (const int ranks : {2, 4, 8}) {
    if (ranks > stack.first.spec.dims.n_heads && !passes_latents(GetParam())) continue;
    for (const auto& [name, error] : errors_of(over_ranks(stack, GetParam(), ranks), want)) {
      const double one = alone.at(name).item<double>();
      EXPECT_GT(one, 0) << name;
      EXPECT_LE(error.item<double>(), 1.5 * one) << name << ", " << ranks << " ranks";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, StackedLayers, ::testing::Values(TrainForm::kLaga, TrainForm::kRing),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace parlat
