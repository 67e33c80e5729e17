#include "parlat/decode/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "parlat/base/error.h"

namespace parlat {

namespace {

// What exists of a sequence's passes goes with it.
class Slot {
 public:
  Slot(Decoder& decoder, int64_t tokens) : decoder_(decoder), slot_(decoder.add_sequence(tokens)) {}
  ~Slot() { decoder_.release(slot_); }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  int64_t number() const { return slot_; }

 private:
  Decoder& decoder_;
  int64_t slot_;
};

// Of log-probabilities in fp64; log_r undefined: no reference.
Evaluation compare_rows(const Tensor& log_p_nV, const Tensor& log_r_nV, const Tensor& target_n) {
  const Tensor best_n = log_p_nV.argmax(1);
  Evaluation sums{.tokens = target_n.numel(),
                  .loss = -log_p_nV.gather(1, target_n.unsqueeze(1)).sum().item<double>(),
                  .correct = best_n.eq(target_n).sum().item<int64_t>()};
  if (log_r_nV.defined()) {
    sums.kl = (log_r_nV.exp() * (log_r_nV - log_p_nV)).sum().item<double>();
    sums.agreed = best_n.eq(log_r_nV.argmax(1)).sum().item<int64_t>();
  }
  return sums;
}

// [window - 1, D]: the last token predicts nothing here.
Tensor window_hidden(Decoder& decoder, const std::vector<int64_t>& window, const EvaluationOptions& options) {
  const int64_t length = static_cast<int64_t>(window.size()) - 1;
  const int64_t exact = options.prefill == PrefillMode::kExact ? std::min(options.prompt, length) : 0;
  const Slot slot(decoder, length);
  Decoder::Prefill prefill{.slot = slot.number(), .done = 0, .latents = {}};
  std::vector<Tensor> hidden;
  for (int64_t begin = 0, end = 0; begin < length; begin = end) {
    end = std::min(begin + options.chunk, begin < exact ? exact : length);
    if (begin < exact) {
      hidden.push_back(decoder.prefill(prefill, {window.begin() + begin, window.begin() + end}));
      continue;
    }
    std::vector<TokenAt> rows;
    for (int64_t i = begin; i < end; ++i) rows.push_back({slot.number(), i, window[i]});
    hidden.push_back(decoder.forward(rows));
  }
  return at::cat(hidden);
}

}  // namespace

double Evaluation::perplexity() const { return std::exp(loss / static_cast<double>(tokens)); }

void Evaluation::add(const Evaluation& other) {
  tokens += other.tokens;
  loss += other.loss;
  correct += other.correct;
  kl += other.kl;
  agreed += other.agreed;
}

std::vector<std::vector<int64_t>> text_windows(const std::vector<int64_t>& tokens, int64_t window,
                                               const std::string& name) {
  std::vector<std::vector<int64_t>> windows;
  for (size_t begin = 0; begin + window <= tokens.size(); begin += window) {
    windows.emplace_back(tokens.begin() + begin, tokens.begin() + begin + window);
  }
  if (windows.empty()) {
    throw DataError("{}: expected at least one window of {} tokens, got {}", name, window, tokens.size());
  }
  return windows;
}

std::vector<std::vector<int64_t>> copied_windows(const std::vector<int64_t>& tokens, int64_t window,
                                                 const std::string& name) {
  std::vector<std::vector<int64_t>> passages = text_windows(tokens, window / 2, name);
  for (std::vector<int64_t>& passage : passages) {
    const std::vector<int64_t> again = passage;
    passage.insert(passage.end(), again.begin(), again.end());
  }
  return passages;
}

std::vector<Evaluation> evaluate(const std::vector<Decoder*>& decoders, Decoder* reference,
                                 const std::vector<std::vector<int64_t>>& windows, int64_t from,
                                 const EvaluationOptions& options, const std::function<void(int64_t)>& progress) {
  std::vector<Evaluation> totals(decoders.size());
  std::vector<Decoder*> all = decoders;
  if (reference != nullptr && std::count(all.begin(), all.end(), reference) == 0) all.push_back(reference);
  int64_t done = 0, tokens = 0;
  for (std::vector<int64_t> window : windows) {
    if (options.max_tokens > 0) {
      const int64_t left = options.max_tokens - tokens;
      if (left <= 0) break;
      window.resize(std::min<int64_t>(window.size(), from + left));
    }
    std::map<Decoder*, Tensor> hidden_nD;
    for (Decoder* const decoder : all) hidden_nD[decoder] = window_hidden(*decoder, window, options);
    const int64_t length = static_cast<int64_t>(window.size());
    for (int64_t first = from; first < length; first += options.chunk) {
      const int64_t count = std::min(options.chunk, length - first);
      const Tensor target_n = at::tensor(at::ArrayRef<int64_t>(window).slice(first, count), at::kLong);
      const auto log_probabilities = [&](Decoder* decoder) {
        const Tensor logits_nV = decoder->logits(hidden_nD.at(decoder).narrow(0, first - 1, count));
        return at::log_softmax(logits_nV.to(at::kDouble), 1);
      };
      const Tensor log_r_nV = reference != nullptr ? log_probabilities(reference) : Tensor();
      for (size_t i = 0; i < decoders.size(); ++i) {
        const Tensor log_p_nV = decoders[i] == reference ? log_r_nV : log_probabilities(decoders[i]);
        totals[i].add(compare_rows(log_p_nV, log_r_nV, target_n));
      }
    }
    tokens += length - from;
    progress(++done);
  }
  return totals;
}

}  // namespace parlat
