#include "parlat/plan/decode_plan.h"

#include <algorithm>
#include <cmath>

#include "parlat/base/error.h"
#include "parlat/base/units.h"
#include "parlat/plan/flops.h"

namespace parlat {

namespace {

constexpr int64_t kKeyHeads = 8, kKeyWidth = 128;  // of the yardstick
constexpr int64_t kMostTokens = int64_t{1} << 40;

// One layer's attention on the rank that holds most.
struct LayerWork {
  double cache_elements = 0;  // a token of a sequence
  double weights = 0;         // elements that a token is multiplied with
  double pair_flops = 0;      // a token of the batch and a token of the cache that lies here
  double tokens_here = 1;     // share of the cache's tokens
  double exchanged = 0;       // elements sent a token, besides the all-reduces
  int64_t exchanges = 0;
};

LayerWork latent_work(const MlaDims& d, const LayoutSpec& layout, int ranks, bool split_projections) {
  const Placement p = place(layout, d, ranks, 0);
  const auto width = static_cast<double>(even_share(d.d_latent, p.groups, 0).size()),
             rope = static_cast<double>(d.d_rope);
  const auto heads = static_cast<double>(p.heads.size()), members = static_cast<double>(p.members);
  const auto n_heads = static_cast<double>(d.n_heads), d_model = static_cast<double>(d.d_model);
  const double projected = split_projections ? static_cast<double>(p.prefill_heads.size()) : heads;
  LayerWork work;
  work.tokens_here = p.tokens_split ? 1 / members : 1;
  work.cache_elements = cache_elements_per_token(d, layout, ranks);
  const double query = d.d_q_latent
                           ? static_cast<double>(*d.d_q_latent) * (d_model + projected * static_cast<double>(d.d_qk()))
                           : d_model * projected * static_cast<double>(d.d_qk());
  const double maps = heads * width * static_cast<double>(d.d_nope + d.d_v);
  work.weights =
      query + d_model * static_cast<double>(d.d_cache()) + maps + projected * static_cast<double>(d.d_v) * d_model;
  const double attending = p.tokens_split ? n_heads : heads;
  work.pair_flops = 2 * attending * (2 * width + rope);
  if (p.tokens_split && p.members > 1) {
    work.exchanged = heads * (width + rope) * (members - 1) + (n_heads - heads) * (width + 1);
    work.exchanges = 2;
  }
  if (projected < heads) {
    work.exchanged +=
        projected * static_cast<double>((p.groups - 1) * d.d_qk()) + (heads - projected) * static_cast<double>(d.d_v);
    work.exchanges += 2;
  }
  return work;
}

// As many query heads, the weights of mla's placement.
LayerWork grouped_query_work(const MlaDims& d, int ranks) {
  LayerWork work = latent_work(d, {}, ranks, /*split_projections=*/false);
  const auto heads = static_cast<double>(even_share(d.n_heads, ranks, 0).size());
  const auto key_heads = static_cast<double>(even_share(kKeyHeads, std::min<int64_t>(ranks, kKeyHeads), 0).size());
  work.cache_elements = 2 * key_heads * static_cast<double>(kKeyWidth);
  work.pair_flops = 2 * heads * 2 * static_cast<double>(kKeyWidth);
  return work;
}

// Weights outside attention, elements of all layers on one rank: held, and read by a batch.
struct FeedForward {
  double held = 0, active = 0;  // active: by one token
  double routed = 0;            // of held, in experts
  double n_routed = 1, experts_per_token = 1;
  double read(double batch) const {
    const double visited = 1 - std::pow(1 - experts_per_token / n_routed, batch);
    return held - routed + routed * visited;
  }
};

FeedForward feed_forward(const DecodePlanOptions& options) {
  FeedForward work;
  if (options.attention_only) return work;
  const ModelConfig& config = options.config;
  const auto ranks = static_cast<double>(options.ranks);
  const ParameterCount count = count_parameters(config);
  const AttentionFlops attention = attention_flops(config.mla.dims, {1});
  const double in_attention = attention.projections / 2 * static_cast<double>(config.n_layers);
  const double embedding =
      config.tied_embeddings ? 0 : static_cast<double>(config.vocab_size * config.mla.dims.d_model);
  work.held = (static_cast<double>(count.total) - in_attention) / ranks;
  work.active = (static_cast<double>(count.active) - in_attention - embedding) / ranks;
  if (!config.moe) return work;
  work.n_routed = static_cast<double>(config.moe->n_routed);
  work.experts_per_token = static_cast<double>(config.moe->experts_per_token);
  int64_t moe_layers = 0;
  for (int64_t layer = 0; layer < config.n_layers; ++layer) moe_layers += config.is_moe_layer(layer) ? 1 : 0;
  work.routed = static_cast<double>(moe_layers * 3 * config.mla.dims.d_model) *
                static_cast<double>(config.moe->n_routed * config.moe->d_expert) / ranks;
  return work;
}

class StepModel {
 public:
  StepModel(const Machine& machine, const DecodePlanOptions& options)
      : machine_(machine),
        options_(options),
        gemm_(machine.gemm_in(options.dtype)),
        rates_(machine.attention_in(options.dtype)),
        element_bytes_(static_cast<double>(dtype_bytes(options.dtype))),
        weight_bytes_(options.weight_element_bytes > 0 ? options.weight_element_bytes : element_bytes_),
        layers_(static_cast<double>(options.config.n_layers)),
        feed_forward_(feed_forward(options)),
        sharing_(std::max(1.0, static_cast<double>(options.ranks) /
                                   static_cast<double>(options.nodes * machine.ranks_at_full_rate))) {}

  double cache_bytes_per_token(const LayerWork& work) const { return work.cache_elements * layers_ * element_bytes_; }
  double weight_bytes(const LayerWork& work) const {
    return (work.weights * layers_ + feed_forward_.held) * weight_bytes_;
  }

  DecodeStep step(const LayerWork& work, int64_t sequences) const {
    DecodeStep one = step_in(1, work, sequences);
    if (!options_.two_batches || sequences < 2) return one;
    DecodeStep two = step_in(2, work, sequences);
    two.exchange_s -= machine_.overlap * std::min(two.exchange_s, two.compute_s);
    return two.tokens_per_s() > one.tokens_per_s() ? two : one;
  }

 private:
  // As `parts` batches, one after the other.
  DecodeStep step_in(int64_t parts, const LayerWork& work, int64_t sequences) const {
    const auto context = static_cast<double>(options_.context), all = static_cast<double>(sequences),
               times = static_cast<double>(parts), batch = all / times;
    DecodeStep step{.batch = sequences};
    step.weight_bytes = times * (work.weights * layers_ + feed_forward_.read(batch)) * weight_bytes_;
    step.cache_bytes = all * context * cache_bytes_per_token(work);
    const double product_flops = 2 * all * (work.weights * layers_ + feed_forward_.active);
    const double attention_flops = all * context * work.tokens_here * work.pair_flops * layers_;
    const double bandwidth = machine_.memory_bytes_per_s;
    step.compute_s = sharing_ * (std::max(step.weight_bytes / bandwidth, product_flops / gemm_.at(batch)) +
                                 std::max(step.cache_bytes / bandwidth, attention_flops / decode_rate()) +
                                 times * layers_ * machine_.layer_overhead_s);
    exchange(work, parts, step);
    return step;
  }

  double decode_rate() const { return rates_.decode_rate.value_or(rates_.fused.forward); }

  // An all-reduce is a reduce-scatter and a gather, a latency each.
  void exchange(const LayerWork& work, int64_t parts, DecodeStep& step) const {
    const auto ranks = static_cast<double>(options_.ranks);
    if (options_.ranks == 1) return;
    const double all_reduces = options_.attention_only ? 1 : 2;
    const double reduced =
        all_reduces * 2 * (ranks - 1) / ranks * static_cast<double>(options_.config.mla.dims.d_model);
    step.sent_bytes = layers_ * static_cast<double>(step.batch) * (reduced + work.exchanged) * element_bytes_;
    const Link& link = options_.nodes > 1 ? machine_.between_nodes() : machine_.within;
    const double calls = static_cast<double>(parts) * (2 * all_reduces + static_cast<double>(work.exchanges));
    step.exchange_s =
        layers_ * calls * link.decode_latency_s.value_or(link.latency_s) + step.sent_bytes / link.bytes_per_s;
  }

  const Machine& machine_;
  const DecodePlanOptions& options_;
  const RateCurve& gemm_;
  const AttentionRates& rates_;
  const double element_bytes_, weight_bytes_, layers_;
  const FeedForward feed_forward_;
  const double sharing_;
};

void check(const Machine& machine, const DecodePlanOptions& options) {
  check_ranks(machine, options.ranks, options.nodes);
  const auto within = [](const char* what, int64_t value, int64_t most) {
    if (value < 1 || value > most) throw ConfigError("{}: expected 1 to {}, got {}", what, most, value);
  };
  within("context", options.context, kMostTokens);
  for (const int64_t batch : options.batches) within("batch", batch, kMostTokens);
}

void fill(const StepModel& model, const LayerWork& work, const DecodePlanOptions& options, double memory,
          LayoutPlan& plan) {
  plan.placed = true;
  plan.cache_bytes_per_token = model.cache_bytes_per_token(work);
  plan.weight_bytes = model.weight_bytes(work);
  constexpr double kMostCached = 1e18;
  const double tokens = std::min(kMostCached, std::floor((memory - plan.weight_bytes) / plan.cache_bytes_per_token));
  if (tokens < 1) {
    plan.misfit = fmt::format("{} of weights in {}", format_bytes(plan.weight_bytes), format_bytes(memory));
    return;
  }
  plan.largest_context = static_cast<int64_t>(tokens);
  plan.largest_batch = plan.largest_context / options.context;
  const double sequence_bytes = plan.cache_bytes_per_token * static_cast<double>(options.context);
  const std::string room = format_bytes(memory - plan.weight_bytes);
  if (plan.largest_batch == 0) {
    plan.misfit = fmt::format("one sequence takes {} in {}", format_bytes(sequence_bytes), room);
    return;
  }
  for (const int64_t batch : options.batches) {
    if (batch <= plan.largest_batch) {
      plan.steps.push_back(model.step(work, batch));
    } else {
      const std::string taken = format_bytes(sequence_bytes * static_cast<double>(batch));
      plan.steps.push_back({.batch = batch, .misfit = fmt::format("the batch takes {} in {}", taken, room)});
    }
  }
  plan.steps.push_back(model.step(work, plan.largest_batch));
}

}  // namespace

std::vector<LayoutPlan> plan_decode(const Machine& machine, const DecodePlanOptions& options) {
  check(machine, options);
  const double memory = options.memory_bytes > 0 ? options.memory_bytes : machine.memory_bytes;
  const MlaDims& d = options.config.mla.dims;
  const auto ranks = static_cast<int>(options.ranks);
  const StepModel model(machine, options);
  std::vector<LayoutPlan> plans;
  for (const DecodeLayout layout : all_decode_layouts()) {
    for (const int64_t groups : is_sliced(layout) ? std::vector<int64_t>{2, 4, 8} : std::vector<int64_t>{1}) {
      LayoutPlan plan{.label = std::string(name(layout)), .groups = groups};
      try {
        if (groups > d.d_latent) throw ConfigError("layout: expected at most {} groups, got {}", d.d_latent, groups);
        fill(model, latent_work(d, {layout, groups}, ranks, options.split_projections), options, memory, plan);
      } catch (const ConfigError& error) {  // of place
        const std::string text = error.what();
        plan.misfit = text.substr(text.find(": ") + 2);
      }
      plans.push_back(std::move(plan));
    }
  }
  LayoutPlan yardstick{.label = "gqa", .groups = kKeyHeads};
  if (options.ranks <= d.n_heads) {
    fill(model, grouped_query_work(d, ranks), options, memory, yardstick);
  } else {
    yardstick.misfit = fmt::format("expected at most {} ranks to split the {} heads", d.n_heads, d.n_heads);
  }
  plans.push_back(std::move(yardstick));
  return plans;
}

}  // namespace parlat
