#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "parlat/model/attention.h"
#include "parlat/model/moe.h"

namespace parlat {

// The whole model around an Attention. Holds references: config, weights, attention and communicator outlive it.
class Transformer {
 public:
  Transformer(const ModelConfig& config, const ModelWeights& weights, const Attention& attention, Communicator& experts)
      : config_(config), weights_(weights), attention_(attention), experts_(experts) {}

  // Called after every stage with "embedding", "layer 3 attention", "layer 3 mlp", "final norm".
  using Observer = std::function<void(const std::string& stage, const Tensor& activation)>;

  // tokens [B, S_local] int64 -> hidden [B, S_local, D] after the final norm. Throws ConfigError with the first token
  // outside the vocabulary.
  Tensor forward(const Tensor& tokens_BS, const TokenShard& shard, const Observer& observe = nullptr) const;
  // hidden -> [.., vocabulary], in the weights' dtype.
  Tensor logits(const Tensor& hidden) const;
  const Tensor& head() const { return weights_.head; }

 private:
  Tensor feed_forward(const LayerWeights& layer, const Tensor& x_BSD) const;

  const ModelConfig& config_;
  const ModelWeights& weights_;
  const Attention& attention_;
  Communicator& experts_;
};

inline constexpr int64_t kIgnoredTarget = -100;

// Sum over tokens of -log softmax(logits)[target], fp32 (fp64 for fp64); ignored targets add nothing. No tokens: 0, on
// the graph like any other. hidden [n, D] goes through the head in blocks of tokens, so that logits of all tokens never
// exist together; the backward recomputes each block. Throws ConfigError with the first target outside the vocabulary.
//   saved  hidden, and one number a token
//   cost   4 n V D multiply-adds forward and backward, a third more than with logits kept
Tensor token_loss_sum(const Transformer& model, const Tensor& hidden_nD, const Tensor& targets_n);

}  // namespace parlat
