#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "parlat/tensor/shape.h"

namespace parlat {

// How the next token is drawn from logits.
struct Sampling {
  double temperature = 0;  // 0: the largest logit, of equal ones the lowest token (greedy)
  int64_t top_k = 0;       // only the k largest; 0: all
  double top_p = 1;        // only the fewest whose probabilities add up to p or more
  uint64_t seed = 1;
};
// Throws ConfigError for values that mean nothing.
void validate(const Sampling& sampling);

// The token for position `index` of the sequence that `seed` names: depends on nothing but these and the logits
// [vocabulary] fp32, which are finite, so batch and ranks change nothing.
int64_t sample(const Tensor& logits_V, const Sampling& sampling, int64_t index);

}  // namespace parlat
