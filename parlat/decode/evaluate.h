#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "parlat/decode/decoder.h"

namespace parlat {

enum class PrefillMode { kExact, kSliced };

struct EvaluationOptions {
  int64_t max_tokens = 0;  // predicted tokens at most; 0: all
  PrefillMode prefill = PrefillMode::kSliced;
  int64_t prompt = 0;   // with exact prefill: the first tokens of a window, which then are not counted
  int64_t chunk = 512;  // tokens of a window in one pass; what attention needs for itself grows with them
};

// Sums over predicted tokens.
struct Evaluation {
  int64_t tokens = 0;
  double loss = 0;      // -ln p(token)
  int64_t correct = 0;  // the largest logit is the token's
  double kl = 0;        // KL(reference || layout), where there is a reference
  int64_t agreed = 0;   // the largest logit is the reference's
  double perplexity() const;
  void add(const Evaluation& other);
};

// Windows of `window` tokens of a text, one after the other; the rest is dropped. Throws DataError, naming `name`, for
// a text that fills none.
std::vector<std::vector<int64_t>> text_windows(const std::vector<int64_t>& tokens, int64_t window,
                                               const std::string& name);

// A passage of half a window, then the same again: what attention to far tokens is needed for.
std::vector<std::vector<int64_t>> copied_windows(const std::vector<int64_t>& tokens, int64_t window,
                                                 const std::string& name);

// Collective. Evaluates layouts on windows, each on its own, from token `from` (1 or later) on, against a reference if
// there is one, which may be one of them. `progress` hears of the windows done.
//   cost  each decoder runs each window once; of a window exist [window, D] fp32 of every decoder and log-probabilities
//         of two chunks, [chunk, vocabulary] fp64
std::vector<Evaluation> evaluate(const std::vector<Decoder*>& decoders, Decoder* reference,
                                 const std::vector<std::vector<int64_t>>& windows, int64_t from,
                                 const EvaluationOptions& options, const std::function<void(int64_t)>& progress);

}  // namespace parlat
