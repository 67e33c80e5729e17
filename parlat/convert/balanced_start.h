#pragma once

#include <cstdint>
#include <vector>

#include "parlat/convert/sliced_layer.h"

namespace parlat {

// Square root of a covariance and its inverse: to and from coordinates in which the latent is white.
struct Whitening {
  Tensor root_LL, inverse_LL;  // fp64
};
Whitening whitening(const Tensor& covariance_LL);

// What matters to scores and what to the output, in white coordinates: the same for every number of shared ones.
struct ScoreCoordinates {
  Whitening whitening;
  Tensor by_score_LL;       // directions in columns, those that matter most to scores first
  Tensor output_metric_LL;  // how strongly a direction shows in the layer's output
};
ScoreCoordinates score_coordinates(const LayerSamples& samples, const std::vector<QuerySample>& queries);

// Closed forms to start the fit from (docs/slicing.md). All scores are the best linear estimates of the whole score.

// Slice g has the g-th block of principal coordinates of c_kv / kv_norm. They give back the latent exactly.
std::vector<SliceMaps> principal_blocks(const LayerSamples& samples, int64_t groups);

struct Start {
  std::vector<SliceMaps> slices;
  Whitening whitening;
  double error = 0;  // of the output, mean over the queries
};

// Every slice has the `shared` coordinates that matter most to scores; the rest of its columns are coordinates that
// matter most to the output, dealt out; (groups - 1) * shared coordinates are given up. Value maps by least squares.
Start shared_scores(const ScoreCoordinates& coordinates, const std::vector<QuerySample>& queries,
                    const MlaWeights& weights, int64_t groups, int64_t shared);

// Of principal blocks and shared scores, with about sixteen numbers of shared coordinates, the one of the smallest
// error.
Start best_start(const LayerSamples& samples, const std::vector<QuerySample>& queries, int64_t groups);

double mean_error(const std::vector<SliceMaps>& slices, const std::vector<QuerySample>& queries,
                  const MlaWeights& weights);

}  // namespace parlat
