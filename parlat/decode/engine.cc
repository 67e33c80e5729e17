#include "parlat/decode/engine.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "parlat/base/error.h"

namespace parlat {

const char* name(Finish finish) {
  switch (finish) {
    case Finish::kStopToken:
      return "stop token";
    case Finish::kLength:
      return "length";
    case Finish::kContext:
      return "context limit";
  }
  throw InternalError("an unknown finish");
}

int64_t Engine::submit(const Request& request) {
  validate(request.sampling);
  const ModelConfig& config = decoder_.config();
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt == 0) throw ConfigError("prompt: expected at least one token, got none");
  if (request.max_new_tokens < 1) {
    throw ConfigError("new tokens: expected at least 1, got {}", request.max_new_tokens);
  }
  for (const int64_t token : request.prompt) {
    if (token < 0 || token >= config.vocab_size) {
      throw ConfigError("prompt: expected tokens from 0 to {}, got {}", config.vocab_size - 1, token);
    }
  }
  if (prompt >= config.max_positions) {
    throw ConfigError("prompt: expected fewer tokens than the context of {}, got {}", config.max_positions, prompt);
  }
  Sequence sequence{.id = submitted_, .request = request, .limit = 0, .length = 0, .prefill = {}, .next = 0, .made = 0};
  sequence.limit = prompt + std::min(request.max_new_tokens, config.max_positions - prompt);
  if (!decoder_.fits(sequence.limit)) {
    throw ConfigError("cache: expected room for the {} tokens of a request, got {}", sequence.limit,
                      decoder_.cache_tokens());
  }
  waiting_.push_back(std::move(sequence));
  return submitted_++;
}

void Engine::admit() {
  while (!waiting_.empty() && decoder_.has_room(waiting_.front().limit)) {
    Sequence& sequence = waiting_.front();
    sequence.prefill.slot = decoder_.add_sequence(sequence.limit);
    prefilling_.push_back(std::move(sequence));
    waiting_.pop_front();
  }
}

std::vector<Emission> Engine::step() {
  std::vector<Emission> emissions;
  admit();
  decode_tokens(emissions);
  prefill_chunk(emissions);
  return emissions;
}

void Engine::prefill_chunk(std::vector<Emission>& emissions) {
  if (prefilling_.empty()) return;
  const std::optional<Tensor> logits_V = run_prompt(prefilling_.front());
  if (!logits_V) return;
  Sequence done = std::move(prefilling_.front());
  prefilling_.pop_front();
  done.prefill.latents.clear();
  if (emit(done, *logits_V, emissions)) running_.push_back(std::move(done));
}

std::optional<Tensor> Engine::run_prompt(Sequence& sequence) {
  const std::vector<int64_t>& prompt = sequence.request.prompt;
  const int64_t length = static_cast<int64_t>(prompt.size());
  const Range chunk{sequence.length, std::min(sequence.length + options_.prefill_chunk, length)};
  const bool last = chunk.end == length;
  sequence.length = chunk.end;
  const int64_t slot = sequence.prefill.slot;
  if (options_.remote_prefill) {
    const Tensor logits_V = options_.remote_prefill(slot, chunk, last);
    return last ? std::optional(logits_V) : std::nullopt;
  }
  Tensor hidden_nD;
  if (options_.exact_prefill) {
    hidden_nD = decoder_.prefill(sequence.prefill, {prompt.begin() + chunk.begin, prompt.begin() + chunk.end});
  } else {
    std::vector<TokenAt> rows;
    for (int64_t i = chunk.begin; i < chunk.end; ++i) rows.push_back({slot, i, prompt[i]});
    hidden_nD = decoder_.forward(rows);
  }
  if (!last) return std::nullopt;
  return decoder_.logits(hidden_nD.narrow(0, hidden_nD.size(0) - 1, 1))[0];
}

void Engine::decode_tokens(std::vector<Emission>& emissions) {
  if (running_.empty()) return;
  std::vector<TokenAt> rows;
  for (const Sequence& sequence : running_) rows.push_back({sequence.prefill.slot, sequence.length, sequence.next});
  const Tensor logits_nV = decoder_.logits(decoder_.forward(rows));
  std::vector<Sequence> still;
  for (size_t i = 0; i < running_.size(); ++i) {
    ++running_[i].length;
    if (emit(running_[i], logits_nV[static_cast<int64_t>(i)], emissions)) still.push_back(std::move(running_[i]));
  }
  running_ = std::move(still);
}

bool Engine::emit(Sequence& sequence, const Tensor& logits_V, std::vector<Emission>& emissions) {
  const Request& request = sequence.request;
  Emission emission{.request = sequence.id, .token = sample(logits_V, request.sampling, sequence.made), .finish = {}};
  ++sequence.made;
  sequence.next = emission.token;
  if (std::count(request.stop_tokens.begin(), request.stop_tokens.end(), emission.token) > 0) {
    emission.finish = Finish::kStopToken;
  } else if (sequence.made == request.max_new_tokens) {
    emission.finish = Finish::kLength;
  } else if (sequence.length + 1 >= decoder_.config().max_positions) {
    // The token just drawn would take the last position: there is none for what would follow it.
    emission.finish = Finish::kContext;
  }
  emissions.push_back(emission);
  if (emission.finish) decoder_.release(sequence.prefill.slot);
  return !emission.finish;
}

}  // namespace parlat
