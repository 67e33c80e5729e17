#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "parlat/base/range.h"
#include "parlat/convert/layer_samples.h"
#include "parlat/weights/slice_maps.h"

namespace parlat {

// Queries that may be drawn: those at some positions of some windows of the calibration text.
struct QueryPool {
  std::vector<int64_t> windows;
  Range positions;
};

// An eighth of the windows, at least one and at even distances, is kept to judge by: no query of theirs is fitted. Of a
// single window it is the last eighth of the positions.
struct SplitQueries {
  QueryPool fit, judge;
};
SplitQueries split_queries(int64_t n_windows, int64_t n_tokens);

struct SampleSize {
  int64_t windows = 4, queries = 128;  // of each window
  uint64_t seed = 1;
};

// Queries of some windows of the calibration text, and what they see.
struct QuerySample {
  Tensor absorbed_bHqL;     // times the softmax scale
  Tensor rope_scores_bHqS;  // with -inf for keys that a query does not see
  Tensor c_kv_b1SL;
  Tensor out_latent_bHqL;  // the exact layer's weighted latents
  Tensor out_bqD;          // and its output
};
// The index-th sample: windows and queries follow from size.seed and index.
QuerySample sample_queries(const LayerSamples& samples, const QueryPool& pool, const SampleSize& size, int64_t index);

// The slices' weighted latents one beside the other, [b, H, q, sum of w].
Tensor sliced_out_latent(const std::vector<SliceMaps>& slices, const QuerySample& sample);

// Mean squared error of the output that the value maps make of such weighted latents, over the exact one's variance.
Tensor value_error(const std::vector<SliceMaps>& slices, const Tensor& out_latent_bHqw, const QuerySample& sample,
                   const MlaWeights& weights);

// The same of the sliced layer as a whole; differentiable in the maps.
Tensor output_error(const std::vector<SliceMaps>& slices, const QuerySample& sample, const MlaWeights& weights);

}  // namespace parlat
