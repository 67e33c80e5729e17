#include "parlat/bench/decode_bench.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <future>

#include "parlat/base/error.h"
#include "parlat/decode/decoder.h"
#include "parlat/tensor/compare.h"
#include "parlat/tensor/fill.h"

namespace parlat {

namespace {

double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Sequences of `context` stored tokens each, one token a step.
struct Sequences {
  std::vector<int64_t> slots;
  int64_t length = 0;

  std::vector<TokenAt> step(int64_t vocab_size) {
    std::vector<TokenAt> rows;
    for (const int64_t slot : slots) rows.push_back({slot, length, (31 * slot + 17 * length) % vocab_size});
    ++length;
    return rows;
  }
};

// How MLPs, experts and vocabulary are split does not depend on their widths; attention stays as it is.
ModelConfig verified_part(ModelConfig config) {
  constexpr int64_t kLayers = 4, kVocabulary = 512, kMlp = 256, kExpert = 32, kExperts = 8;
  config.n_layers = std::min(config.n_layers, kLayers);
  config.vocab_size = std::min(config.vocab_size, kVocabulary);
  config.d_mlp = std::min(config.d_mlp, kMlp);
  if (config.moe) {
    config.moe->d_expert = std::min(config.moe->d_expert, kExpert);
    config.moe->n_routed = std::min(config.moe->n_routed, kExperts * config.moe->n_group);
  }
  return config;
}

// The attention of the first layer against fp64, for the first sequence. Every rank finds the same.
void verify_attention(Decoder& decoder, const Sequences& sequences, Communicator& comm, DecodeBenchRow& row) {
  const MlaDims& d = decoder.config().mla.dims;
  const Placement& p = decoder.shard().placement;
  const int64_t width = decoder.shard().layers[0].attention.width, local = p.local_count(sequences.length);
  const PagedLatents cache = decoder.cache().view(0, {sequences.slots[0]}, {local});
  const Tensor q = seeded_normal({1, p.heads.size(), width + d.d_rope}, 1 / std::sqrt(double(width)), 1, "q");
  const Tensor got = decode_attention(q, cache, d.d_rope).out_nhw[0];
  std::vector<Tensor> pages;
  for (const int32_t page : cache.pages[0]) pages.push_back(cache.rows_nd.narrow(0, page * kPageTokens, kPageTokens));
  const Tensor rows = at::cat(pages).narrow(0, 0, local).to(at::kDouble);
  const Tensor want = at::matmul(at::matmul(q[0].to(at::kDouble), rows.t()).softmax(-1), rows.narrow(1, 0, width));
  const at::ScalarType operands = decode_operand_dtype(cache.rows_nd.scalar_type());
  const Comparison result = compare(got, want, Tolerance::rounding(operands, width + d.d_rope, 3));
  row.max_error = comm.max_over_ranks(result.max_error, "bench decode");
  row.tolerance = comm.max_over_ranks(result.allowed, "bench decode");
  row.ok = comm.max_over_ranks(result.close ? 0 : 1, "bench decode") == 0;
}

// Pages that fit in the budget of a rank.
int64_t pages_in_budget(const DecodeBenchOptions& options, const ModelShard& shard) {
  int64_t elements = 0;  // of one row, over all layers
  for (const LayerShard& layer : shard.layers) elements += layer.attention.width + shard.config.mla.dims.d_rope;
  return options.cache_budget / (elements * static_cast<int64_t>(c10::elementSize(options.cache_dtype)) * kPageTokens);
}

// Sequences of `context` tokens that fit in so many pages on every rank.
int64_t batch_in_pages(int64_t pages, const Placement& placement, int64_t context, Communicator& comm) {
  const int64_t each = std::max<int64_t>(1, LatentCache::pages_for(placement.local_count(context)));
  return -static_cast<int64_t>(comm.max_over_ranks(-static_cast<double>(pages / each), "bench decode"));
}

void time_steps(const DecodeBenchOptions& options, Decoder& decoder, Communicator& comm, Sequences& sequences,
                DecodeBenchRow& row) {
  const auto most = [&](double of_rank) { return comm.max_over_ranks(of_rank, "bench decode"); };
  const auto step = [&] { decoder.logits(decoder.forward(sequences.step(options.config.vocab_size))); };
  const Traffic before = comm.traffic();
  step();  // to warm up
  row.sent_bytes = static_cast<int64_t>(most(static_cast<double>((comm.traffic() - before).bytes())));
  std::vector<double> ms;
  for (int64_t i = 0; i < options.steps; ++i) {
    comm.barrier("bench decode");
    ms.push_back(most(1e3 * seconds_of(step)));
  }
  row.ms = spread_of(ms);
  const double seconds = row.ms.median / 1e3;
  row.tokens_per_s = static_cast<double>(row.batch) / seconds;
  const Placement& p = decoder.shard().placement;
  const MlaDims& d = options.config.mla.dims;
  const double rows = static_cast<double>(row.batch * p.local_count(row.context)),
               layers = static_cast<double>(options.config.n_layers);
  const double width = static_cast<double>(decoder.shard().layers[0].attention.width);
  const double heads = static_cast<double>(p.tokens_split ? d.n_heads : p.heads.size());
  row.cache_gb_per_s = most(rows * static_cast<double>(decoder.cache().bytes_per_row())) / seconds / 1e9;
  row.attention_gflops = most(2 * rows * layers * heads * (2 * width + static_cast<double>(d.d_rope))) / seconds / 1e9;
}

// Completes a row of which context, batch and step are known. Without sequences, or after steps that are not the
// layout's, it says only what a token takes.
void bench_case(const DecodeBenchOptions& options, Decoder& decoder, Communicator& comm, DecodeBenchRow& row) {
  row.cache_bytes_per_token = comm.max_over_ranks(decoder.cache_bytes_per_token(), "bench decode");
  row.ok = row.step.ok;
  if (row.batch == 0 || !row.ok) return;
  const int64_t own = options.steps + 1;  // tokens that the steps store
  Sequences sequences;
  sequences.length = options.cache_budget > 0 ? row.context - own : row.context;
  for (int64_t i = 0; i < row.batch; ++i) sequences.slots.push_back(decoder.add_sequence(sequences.length + own));
  const LatentCache& cache = decoder.cache();
  const int64_t taken = (cache.pages() - cache.free_pages()) * kPageTokens * cache.bytes_per_row();
  row.cache_bytes = static_cast<int64_t>(comm.max_over_ranks(static_cast<double>(taken), "bench decode"));
  verify_attention(decoder, sequences, comm, row);
  if (row.ok) time_steps(options, decoder, comm, sequences, row);
  for (const int64_t slot : sequences.slots) decoder.release(slot);
}

}  // namespace

std::vector<DecodeBenchRow> bench_decode(const DecodeBenchOptions& options, const RankRunner& run_ranks,
                                         const std::function<void(const std::string&)>& observe) {
  const int64_t longest = *std::max_element(options.contexts.begin(), options.contexts.end());
  const int64_t shortest = *std::min_element(options.contexts.begin(), options.contexts.end());
  const bool budgeted = options.cache_budget > 0;
  const int64_t most = budgeted ? 0 : *std::max_element(options.batches.begin(), options.batches.end());
  if (budgeted && shortest <= options.steps + 1) {
    throw ConfigError("context: expected more than the {} tokens that the steps store, got {}", options.steps + 1,
                      shortest);
  }
  const ModelSource source{.directory = {}, .slices = {}, .seed = options.seed};
  const LayoutCase verified{.source = source,
                            .model = verified_part(options.config),
                            .layout = options.layout,
                            .dtype = options.dtype,
                            .cache_dtype = options.cache_dtype};
  // In a thread that ends: as long as OpenMP has threads of two, more than there are cores, all of them sleep at once
  // where they would wait for the next division of work, and waking them costs a tenth of a step.
  const LayoutDefinition definition = std::async(std::launch::async, define_layout, verified).get();
  return run_and_keep(
      run_ranks, std::vector<DecodeBenchRow>(), [&](Communicator& comm, std::vector<DecodeBenchRow>& rows) {
        const LayoutCheck step = check_layout(verified, definition, comm);
        ModelShard shard =
            load_model_shard(source, options.config, options.layout, comm.size(), comm.rank(), options.dtype);
        const Placement placement = shard.placement;
        const int64_t pages = budgeted ? pages_in_budget(options, shard) : 0;
        const std::vector<int64_t> lengths(most, longest + options.steps + 2);
        Decoder decoder(std::move(shard), comm,
                        {.cache_tokens = budgeted ? pages * kPageTokens * placement.token_sharers()
                                                  : Decoder::cache_tokens_for(lengths, placement),
                         .cache_dtype = options.cache_dtype,
                         .slice_norm = false});
        decoder.cache().fill_random(options.seed);
        const auto measure = [&](int64_t batch, int64_t context) {
          if (comm.rank() == 0) observe(fmt::format("batch {}, context {}", batch, context));
          DecodeBenchRow& row = rows.emplace_back();
          row.context = context;
          row.batch = batch;
          row.step = step;
          bench_case(options, decoder, comm, row);
        };
        for (const int64_t batch : budgeted ? std::vector<int64_t>{0} : options.batches) {
          for (const int64_t context : options.contexts) {
            measure(budgeted ? batch_in_pages(pages, placement, context, comm) : batch, context);
          }
        }
      });
}

nlohmann::json to_json(const DecodeBenchRow& row, const DecodeBenchOptions& options, int ranks, int threads) {
  return {{"layout", name(options.layout.layout)},
          {"groups", options.layout.groups},
          {"ranks", ranks},
          {"threads", threads},
          {"context", row.context},
          {"batch", row.batch},
          {"cache_budget", options.cache_budget},
          {"cache_bytes", row.cache_bytes},
          {"heads", options.config.mla.dims.n_heads},
          {"dtype", name(options.dtype)},
          {"cache_dtype", name(options.cache_dtype)},
          {"pass", "decode"},
          {"ms", to_json(row.ms)},
          {"tokens_per_s", row.tokens_per_s},
          {"cache_bytes_per_token", row.cache_bytes_per_token},
          {"cache_gb_per_s", row.cache_gb_per_s},
          {"attention_gflops", row.attention_gflops},
          {"sent_bytes", row.sent_bytes},
          {"max_error", row.max_error},
          {"tolerance", row.tolerance},
          {"step_error", row.step.max_error},
          {"step_tolerance", row.step.tolerance},
          {"ok", row.ok}};
}

MachineLimits measure_limits(int threads) {
  const int before = at::get_num_threads();
  at::set_num_threads(threads);
  const auto best = [](const std::function<void()>& body) {
    double seconds = 1e9;
    for (int i = 0; i < 5; ++i) seconds = std::min(seconds, seconds_of(body));
    return seconds;
  };
  constexpr int64_t kFloats = int64_t{1} << 26, kSize = 1024;
  const Tensor from = at::ones({kFloats}), to = at::empty({kFloats});
  const Tensor a = at::ones({kSize, kSize}), c = at::empty({kSize, kSize});
  const MachineLimits limits{
      .copy_gb_per_s = 2.0 * kFloats * sizeof(float) / best([&] { to.copy_(from); }) / 1e9,
      .gemm_gflops = 2.0 * kSize * kSize * kSize / best([&] { at::mm_out(const_cast<Tensor&>(c), a, a); }) / 1e9};
  at::set_num_threads(before);
  return limits;
}

}  // namespace parlat
