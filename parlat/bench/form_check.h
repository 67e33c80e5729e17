#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "parlat/bench/layer_case.h"

namespace parlat {

// How far a form's output and gradients are from the fp64 oracle's: of each tensor the largest error relative to its
// largest value, or the RMS error of a token's (a weight row's) relative to its RMS, whichever is larger.
struct FormCheck {
  bool ok = false;
  std::string worst;     // the tensor nearest to its tolerance, or farthest beyond it: out, x, w_ukv, ...
  double max_error = 0;  // of that tensor
  double tolerance = 0;  // of that tensor, Tolerance::rounding over the layer's longest sum
  std::string text() const;
};

// The oracle's output and gradients of a case.
OracleResult oracle_of(const LayerCase& layer);

// Runs `form` forward and backward on the ranks of comm; gradients of weights are summed over ranks. Every rank of the
// group calls it and gets the same answer.
FormCheck check_form(TrainForm form, const AttentionOptions& options, const LayerCase& layer, const OracleResult& want,
                     Communicator& comm);

}  // namespace parlat
