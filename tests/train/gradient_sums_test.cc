// Every form's gradients where they are added to sums (gradient_sum.h), against those that autograd hands out.
#include "parlat/kernels/gradient_sum.h"

#include <gmock/gmock.h>

#include "parlat/kernels/gemm.h"
#include "tests/form_name.h"
#include "tests/train/form_case.h"

namespace parlat {
namespace {

// One rank's gradients, weights' rounded to their dtype.
std::map<std::string, Tensor> gradients(TrainForm form, const AttentionOptions& options, const FormCase& c,
                                        Communicator& comm, bool sums) {
  const SequenceShards shards = shard_sequence(Sharding::kContiguous, c.x_BSD.size(1), comm.size());
  const TokenShard tokens = make_token_shard(c.spec, c.documents, shards, comm.rank(), c.causal);
  const MlaWeights w = trainable_copy(c.weights);
  const Tensor x = local_tokens(c.x_BSD, shards, comm.rank()).clone().requires_grad_();
  std::map<std::string, Tensor> found;
  for (const auto& [name, weight] : named_weights(w)) {
    if (!sums) continue;
    found[name] = at::zeros(weight.sizes(), compute_dtype(weight.scalar_type()));
    sum_gradients(weight, found[name]);
  }
  const Tensor out = make_attention(form, comm, c.spec.dims, options)->forward(w, x, tokens);
  out.backward(local_tokens(c.grad_out_BSD, shards, comm.rank()));
  for (const auto& [name, weight] : named_weights(w)) {
    EXPECT_EQ(weight.grad().defined(), !sums) << name;
    found[name] = sums ? found[name].to(weight.scalar_type()) : weight.grad();
  }
  found["x"] = x.grad();
  return found;
}

class GradientSums : public ::testing::TestWithParam<TrainForm> {};

// A sum that starts from zero is the gradient, rounded once either way: the same bits.
TEST_P(GradientSums, AreTheGradients) {
  std::vector<AttentionOptions> all = {{}, {.save = SavedKeys::kAll}};
  if (!passes_latents(GetParam())) all.push_back({.kernel = AttentionKernel::kEager});
  for (const AttentionOptions& options : all) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const FormCase c = make_form_case({.n_heads = 8, .dtype = dtype});
      for (const int ranks : {1, 4}) {
        SCOPED_TRACE(fmt::format("kernel {}, save {}, {}, {} ranks", name(options.kernel), name(options.save),
                                 name(dtype), ranks));
        run_ranks(ranks, [&](Communicator& comm) {
          const auto want = gradients(GetParam(), options, c, comm, false);
          for (const auto& [name, got] : gradients(GetParam(), options, c, comm, true)) {
            EXPECT_TRUE(got.equal(want.at(name))) << name;
          }
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, GradientSums, ::testing::ValuesIn(all_train_forms()),
                         [](const auto& info) { return test_name(info.param); });

}  // namespace
}  // namespace parlat
