#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "parlat/decode/decoder.h"
#include "parlat/decode/sampling.h"

namespace parlat {

struct Request {
  std::vector<int64_t> prompt;
  int64_t max_new_tokens = 128;
  std::vector<int64_t> stop_tokens;
  Sampling sampling;
};

enum class Finish { kStopToken, kLength, kContext };  // context: max_position_embeddings reached
const char* name(Finish finish);

// A token that a request was given; the last one says why it is the last.
struct Emission {
  int64_t request = 0;
  int64_t token = 0;
  std::optional<Finish> finish;
};

struct EngineOptions {
  int64_t prefill_chunk = 512;  // tokens of prompts in one pass
  bool exact_prefill = true;    // prompts in the exact explicit form; otherwise through the slices, like decoding
  // Where set, prompts are run by other ranks: called once a chunk, prompts in the order of requests, with the slot,
  // the chunk's tokens and whether it is the prompt's last, for which it returns the logits [vocabulary] of its last
  // token.
  std::function<Tensor(int64_t slot, Range chunk, bool last)> remote_prefill = nullptr;
};

// Continuous batching over a Decoder: requests join when the cache has room for all they may need, and leave when they
// finish, between steps. Every rank submits the same requests and gets the same tokens.
class Engine {
 public:
  Engine(Decoder& decoder, const EngineOptions& options) : decoder_(decoder), options_(options) {}

  // A number that names the request, counting from 0. Throws ConfigError for a prompt that is empty, holds tokens
  // outside the vocabulary, fills the context, or needs more than the whole cache.
  int64_t submit(const Request& request);

  bool idle() const { return waiting_.empty() && prefilling_.empty() && running_.empty(); }
  // Admits, runs one token of every running sequence, then one chunk of one prompt: sequences that go on wait for one
  // chunk at most, and one that has just joined is not run twice in its first step.
  std::vector<Emission> step();

 private:
  struct Sequence {
    int64_t id = 0;
    Request request;
    int64_t limit = 0;   // tokens, prompt included
    int64_t length = 0;  // tokens stored
    Decoder::Prefill prefill;
    int64_t next = 0;  // the token to be run
    int64_t made = 0;  // new tokens so far
  };
  void admit();
  void prefill_chunk(std::vector<Emission>& emissions);
  // Runs the next tokens of a prompt; the logits of its last one, or nothing before that.
  std::optional<Tensor> run_prompt(Sequence& sequence);
  void decode_tokens(std::vector<Emission>& emissions);
  // Draws the token after the last one stored; true if the sequence goes on.
  bool emit(Sequence& sequence, const Tensor& logits_V, std::vector<Emission>& emissions);

  Decoder& decoder_;
  EngineOptions options_;
  int64_t submitted_ = 0;
  std::deque<Sequence> waiting_, prefilling_;
  std::vector<Sequence> running_;
};

}  // namespace parlat
