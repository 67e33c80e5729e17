#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "parlat/convert/layer_samples.h"
#include "parlat/weights/slice_maps.h"

namespace parlat {

struct BalancedOptions {
  int64_t groups = 2;
  int64_t steps = 300;
  int64_t windows = 4, queries = 128;  // of each step
  uint64_t seed = 1;
};

struct BalancedResult {
  std::vector<SliceMaps> slices;
  double error_before = 0, error_after = 0;  // mean squared error of the layer's output over its variance
};

// Our slicing (docs/slicing.md). Every rank has the whole, exactly normalised latent of a new token, so a slice may be
// any linear map of it, scored and handed back through maps of its own; the checkpoint stays as it is. Starts from the
// best closed form (balanced_start.h) and fits store, key and value maps to the layer's exact output on the samples by
// Adam, in coordinates in which the latent is white, at a rate that follows from the start's error. Start and fit are
// judged by windows whose queries neither has seen (split_queries), and the fit is never worse there. Deterministic.
//   cost  a step: attention of windows x queries tokens over their windows, groups + 1 times, forward and backward
BalancedResult balance(const LayerSamples& samples, const BalancedOptions& options);

}  // namespace parlat
