#include "parlat/decode/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

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
Evaluation compare_window(const Tensor& log_p_nV, const Tensor& log_r_nV, const Tensor& target_n) {
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

Tensor window_logits(Decoder& decoder, const std::vector<int64_t>& window, int64_t from,
                     const EvaluationOptions& options) {
  const int64_t length = static_cast<int64_t>(window.size()) - 1;  // the last token predicts nothing here
  const Slot slot(decoder, length);
  std::vector<Tensor> hidden;
  int64_t begin = 0;
  if (options.prefill == PrefillMode::kExact) {
    begin = std::min(options.prompt, length);
    Decoder::Prefill state{.slot = slot.number(), .done = 0, .latents = {}};
    hidden.push_back(decoder.prefill(state, {window.begin(), window.begin() + begin}));
  }
  std::vector<TokenAt> rows;
  for (int64_t i = begin; i < length; ++i) rows.push_back({slot.number(), i, window[i]});
  if (!rows.empty()) hidden.push_back(decoder.forward(rows));
  const Tensor all_nD = at::cat(hidden);
  return decoder.logits(all_nD.narrow(0, from - 1, length - from + 1));
}

std::vector<Evaluation> evaluate(const std::vector<Decoder*>& decoders, Decoder* reference,
                                 const std::vector<std::vector<int64_t>>& windows, int64_t from,
                                 const EvaluationOptions& options, const std::function<void(int64_t)>& progress) {
  std::vector<Evaluation> totals(decoders.size());
  int64_t done = 0, tokens = 0;
  for (const std::vector<int64_t>& window : windows) {
    std::vector<int64_t> targets(window.begin() + from, window.end());
    if (options.max_tokens > 0) {
      const int64_t left = options.max_tokens - tokens;
      if (left <= 0) break;
      targets.resize(std::min<int64_t>(targets.size(), left));
    }
    const Tensor target_n = at::tensor(targets, at::kLong);
    const auto log_probabilities = [&](Decoder& decoder) {
      const Tensor logits_nV = window_logits(decoder, window, from, options).narrow(0, 0, target_n.numel());
      return at::log_softmax(logits_nV.to(at::kDouble), 1);
    };
    const Tensor log_r_nV = reference != nullptr ? log_probabilities(*reference) : Tensor();
    for (size_t i = 0; i < decoders.size(); ++i) {
      const Tensor log_p_nV = decoders[i] == reference ? log_r_nV : log_probabilities(*decoders[i]);
      totals[i].add(compare_window(log_p_nV, log_r_nV, target_n));
    }
    tokens += target_n.numel();
    progress(++done);
  }
  return totals;
}

}  // namespace parlat
