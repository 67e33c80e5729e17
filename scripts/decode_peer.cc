// Times decode steps of one sequence in llama.cpp, or with -DIK in ik_llama.cpp (scripts/bench_decode_peers builds
// both). No long prompt is run: the cache's rows of a short one are saved, repeated up to the context, and loaded back.
//   decode_peer MODEL.gguf THREADS f16|bf16|f32 CONTEXT[,CONTEXT...] STEPS
// One line of JSON a context: {"context": 1024, "ms": [every step's, after one to warm up]}
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kPrompt = 64;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "decode_peer: error: %s\n", what.c_str());
  std::exit(1);
}

// Reads the saved state of a sequence from the front and writes the longer one.
class StateCopy {
 public:
  explicit StateCopy(const std::vector<uint8_t>& from) : from_(from) {}

  void copy(size_t bytes) { put(take(bytes), bytes); }
  template <class T>
  T peek() const {
    T value;
    if (at_ + sizeof(T) > from_.size()) fail("the saved state ends early");
    std::memcpy(&value, from_.data() + at_, sizeof(T));
    return value;
  }
  const uint8_t* take(size_t bytes) {
    if (at_ + bytes > from_.size()) fail("the saved state ends early");
    at_ += bytes;
    return from_.data() + at_ - bytes;
  }
  void put(const void* from, size_t bytes) {
    const auto* const first = static_cast<const uint8_t*>(from);
    to_.insert(to_.end(), first, first + bytes);
  }
  void put_u32(uint32_t value) { put(&value, sizeof value); }
  size_t left() const { return from_.size() - at_; }
  const std::vector<uint8_t>& result() const { return to_; }

 private:
  const std::vector<uint8_t>& from_;
  size_t at_ = 0;
  std::vector<uint8_t> to_;
};

// `cells` saved rows become `context`: row i holds what row i % cells held. Each program has its own format, both of
// them one list of keys a layer and, as MLA has it, no values.
std::vector<uint8_t> lengthen(const std::vector<uint8_t>& saved, uint32_t cells, uint32_t context) {
  StateCopy state(saved);
#ifndef IK
  state.copy(8);  // magic, sequence
  const uint32_t streams = state.peek<uint32_t>();
  state.copy(4);
  if (streams != 1) fail("expected one stream in the saved state, got " + std::to_string(streams));
#endif
  const uint32_t found = state.peek<uint32_t>();
  if (found != cells) fail("expected " + std::to_string(cells) + " saved rows, got " + std::to_string(found));
  state.take(4);
  state.put_u32(context);
#ifdef IK
  state.take(cells * 8);
  for (uint32_t i = 0; i < context; ++i) {
    state.put_u32(i);
    state.put_u32(0);  // position, sequences named
  }
  state.copy(4);  // whether there are values
#else
  state.take(cells * 12);
  for (uint32_t i = 0; i < context; ++i) {
    state.put_u32(i);
    state.put_u32(1);
    state.put_u32(0);  // position, sequences named, sequence
  }
  state.copy(4);  // whether values lie transposed
#endif
  const uint32_t layers = state.peek<uint32_t>();
  state.copy(4);
#ifndef IK
  state.copy(8);  // rotated columns
#endif
  for (uint32_t layer = 0; layer < layers; ++layer) {
    state.copy(4);  // type
    const uint64_t row = state.peek<uint64_t>();
    state.copy(8);
    const uint8_t* const rows = state.take(row * cells);
    for (uint32_t i = 0; i < context; ++i) state.put(rows + row * (i % cells), row);
  }
#ifdef IK
  state.copy(4);  // other state: none
#endif
  if (state.left() != 0) fail("bytes left in the saved state: a cache of keys and values, not of latents?");
  return state.result();
}

llama_context* make_context(llama_model* model, int threads, ggml_type type, int tokens) {
  llama_context_params params = llama_context_default_params();
  params.n_seq_max = 1;
  params.n_ctx = (std::max(tokens, kPrompt) + 255) / 256 * 256;
  params.n_batch = params.n_ubatch = kPrompt;
  params.n_threads = params.n_threads_batch = threads;
  params.type_k = params.type_v = type;
#ifdef IK
  params.flash_attn = true;
  params.mla_attn = 3;
#else
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
#endif
  llama_context* const context = llama_init_from_model(model, params);
  if (!context) fail("no context");
  return context;
}

void clear(llama_context* context) {
#ifdef IK
  llama_kv_cache_clear(context);
#else
  llama_memory_clear(llama_get_memory(context), true);
#endif
}

// Tokens at positions first, first + 1, ...; logits of the last.
void decode(llama_context* context, llama_batch& batch, int first, int count, int vocabulary) {
  batch.n_tokens = count;
  for (int i = 0; i < count; ++i) {
    batch.token[i] = (17 * (first + i)) % vocabulary;
    batch.pos[i] = first + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = i + 1 == count;
  }
  if (llama_decode(context, batch) != 0) fail("llama_decode failed");
  llama_synchronize(context);
  if (!std::isfinite(llama_get_logits_ith(context, count - 1)[0])) fail("logits that are not finite");
}

void fill(llama_context* context, llama_batch& batch, int tokens, int vocabulary) {
  const int prompt = std::min(tokens, kPrompt);
  decode(context, batch, 0, prompt, vocabulary);
#ifdef IK
  std::vector<uint8_t> saved(llama_state_seq_get_size(context, 0, 0));
  llama_state_seq_get_data(context, saved.data(), saved.size(), 0, 0);
#else
  std::vector<uint8_t> saved(llama_state_seq_get_size(context, 0));
  llama_state_seq_get_data(context, saved.data(), saved.size(), 0);
#endif
  const std::vector<uint8_t> longer = lengthen(saved, prompt, tokens);
  clear(context);
#ifdef IK
  const size_t read = llama_state_seq_set_data(context, longer.data(), longer.size(), 0, 0);
#else
  const size_t read = llama_state_seq_set_data(context, longer.data(), longer.size(), 0);
#endif
  if (read != longer.size()) fail("the longer state was not taken");
}

void time_context(llama_model* model, int threads, ggml_type type, int tokens, int steps) {
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  llama_context* const context = make_context(model, threads, type, tokens + steps + 1);
  llama_batch batch = llama_batch_init(kPrompt, 0, 1);
  fill(context, batch, tokens, vocabulary);
  std::printf("{\"context\": %d, \"ms\": [", tokens);
  for (int i = 0; i <= steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    decode(context, batch, tokens + i, 1, vocabulary);
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
    if (i > 0) std::printf("%s%.4f", i > 1 ? ", " : "", ms.count());
  }
  std::printf("]}\n");
  std::fflush(stdout);
  llama_batch_free(batch);
  llama_free(context);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) fail("expected MODEL.gguf THREADS f16|bf16|f32 CONTEXTS STEPS");
  const std::string cache = argv[3];
  const ggml_type type = cache == "f16" ? GGML_TYPE_F16 : cache == "bf16" ? GGML_TYPE_BF16 : GGML_TYPE_F32;
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  llama_backend_init();
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  llama_model* const model = llama_model_load_from_file(argv[1], params);
  if (!model) fail(std::string(argv[1]) + ": cannot be loaded");
  std::stringstream contexts(argv[4]);
  for (std::string context; std::getline(contexts, context, ',');) {
    time_context(model, std::atoi(argv[2]), type, std::atoi(context.c_str()), std::atoi(argv[5]));
  }
#ifdef IK
  llama_free_model(model);
#else
  llama_model_free(model);
#endif
}
