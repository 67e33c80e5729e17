#include "parlat/model/transformer.h"

#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/mla/projections.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows of the table. Its gradient sums in fp32, where it is kept if the table has a sum: in bf16 the row of a frequent
// token would stop growing after some hundred summands.
struct Embed : torch::autograd::Function<Embed> {
  static Tensor forward(AutogradContext* ctx, const Tensor& table_ED, const Tensor& tokens_BS) {
    ctx->save_for_backward({table_ED, tokens_BS});
    return metered("residual stream", at::embedding(table_ED, tokens_BS));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_gradients("embedding");
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &table_ED = saved[0], &tokens_BS = saved[1];
    WeightGradient d_table(table_ED, compute_dtype(table_ED.scalar_type()));
    const Tensor d_rows_nD = grads[0].flatten(0, 1).to(d_table.place().scalar_type());
    d_table.place().index_add_(0, tokens_BS.flatten(), d_rows_nD);
    return {d_table.finish(), {}};
  }
};

void check_tokens(const Tensor& tokens_BS, int64_t vocab_size) {
  if (tokens_BS.is_meta()) return;
  const Tensor bad = tokens_BS.lt(0).logical_or(tokens_BS.ge(vocab_size));
  if (!bad.any().item<bool>()) return;
  const Tensor first = bad.nonzero()[0];
  const int64_t b = first[0].item<int64_t>(), s = first[1].item<int64_t>();
  throw ConfigError("token {} of sequence {}: expected 0 to {}, got {}", s, b, vocab_size - 1,
                    tokens_BS[b][s].item<int64_t>());
}

}  // namespace

Tensor Transformer::forward(const Tensor& tokens_BS, const TokenShard& shard, const Observer& observe) const {
  check_shape(tokens_BS, {shard.batch(), shard.local_count()}, "tokens");
  check_tokens(tokens_BS, weights_.embedding.size(0));
  const auto report = [&](const std::string& stage, const Tensor& activation) {
    if (observe) observe(stage, activation.detach());
  };

  Tensor x_BSD = Embed::apply(weights_.embedding, tokens_BS);
  report("embedding", x_BSD);
  for (size_t i = 0; i < weights_.layers.size(); ++i) {
    const LayerWeights& layer = weights_.layers[i];
    const Tensor normed_BSD = rms_norm(x_BSD, layer.attention_norm, config_.rms_norm_eps);
    x_BSD = metered("residual stream", x_BSD + attention_.forward(layer.mla, normed_BSD, shard));
    report(fmt::format("layer {} attention", i), x_BSD);
    x_BSD =
        metered("residual stream", x_BSD + feed_forward(layer, rms_norm(x_BSD, layer.mlp_norm, config_.rms_norm_eps)));
    report(fmt::format("layer {} mlp", i), x_BSD);
  }
  x_BSD = rms_norm(x_BSD, weights_.final_norm, config_.rms_norm_eps);
  report("final norm", x_BSD);
  return x_BSD;
}

Tensor Transformer::feed_forward(const LayerWeights& layer, const Tensor& x_BSD) const {
  if (layer.mlp) return mlp(*layer.mlp, x_BSD);
  const Tensor out_nD = mixture_of_experts(*config_.moe, *layer.moe, x_BSD.flatten(0, 1), experts_);
  return out_nD.view(x_BSD.sizes());
}

Tensor Transformer::logits(const Tensor& hidden) const { return parlat::linear(hidden, weights_.head); }

}  // namespace parlat
