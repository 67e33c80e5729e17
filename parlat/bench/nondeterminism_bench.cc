#include "parlat/bench/nondeterminism_bench.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "parlat/base/error.h"
#include "parlat/base/memory_limit.h"
#include "parlat/base/spread.h"
#include "parlat/base/units.h"
#include "parlat/bench/shuffled_sums.h"
#include "parlat/kernels/gemm.h"
#include "parlat/mla/projections.h"
#include "parlat/plan/flops.h"
#include "parlat/tensor/compare.h"
#include "parlat/tensor/fill.h"
#include "parlat/train/optimizer.h"
#include "parlat/train/sharded_model.h"

namespace parlat {

namespace {

constexpr size_t kStepsBefore = 10;  // a jump is measured from

// One of two equal runs.
class Twin {
 public:
  Twin(const NondeterminismOptions& options, const ModelConfig& config, std::optional<uint64_t> order_seed,
       Communicator& alone)
      : options_(options),
        config_(config),
        mesh_(make_mesh({}, config, alone)),
        model_(config, mesh_, {}, options.seed, options.dtype),
        optimizer_({}, model_.groups(), alone),
        batch_{.tokens_BS = random_tokens("tokens"),
               .targets_BS = random_tokens("targets"),
               .documents = Documents::whole(options.batch, options.sequence)} {
    if (order_seed) sums_.emplace(*order_seed);
  }

  // One step on the one batch; afterwards loss, hidden and experts are those of its forward pass.
  void step() {
    experts_.clear();
    std::optional<ShuffledSums::Scope> scope;
    if (sums_) scope.emplace(*sums_);
    const Tensor loss = model_.loss_sum(batch_, [&](const std::string& stage, const Tensor& x) { look(stage, x); }) /
                        static_cast<double>(options_.batch * options_.sequence);
    loss.backward();
    loss_ = loss.item<double>();
    optimizer_.step(options_.learning_rate);
  }

  double loss() const { return loss_; }
  const Tensor& hidden() const { return hidden_; }
  // [B S, k] of every layer that has experts, by layer.
  const std::map<int64_t, Tensor>& experts() const { return experts_; }
  const std::vector<WeightRow>& weights() const { return model_.table(); }

 private:
  Tensor random_tokens(const char* what) const {
    return seeded_integers({options_.batch, options_.sequence}, config_.vocab_size, options_.seed, what);
  }

  void look(const std::string& stage, const Tensor& x_BSD) {
    if (stage == "final norm") hidden_ = x_BSD;
    for (int64_t layer = 0; layer < config_.n_layers; ++layer) {
      if (config_.is_moe_layer(layer) && stage == fmt::format("layer {} attention", layer)) route_ahead(layer, x_BSD);
    }
  }

  // The router's product is the next one of the forward pass, so that it decides there what it decides here.
  void route_ahead(int64_t layer, const Tensor& x_BSD) {
    const at::NoGradGuard no_grad;
    const auto decide = [&] {
      const LayerWeights& w = model_.weights().layers[layer];
      const Tensor normed_BSD = rms_norm(x_BSD, w.mlp_norm, config_.rms_norm_eps);
      experts_[layer] = route(*config_.moe, *w.moe, normed_BSD.flatten(0, 1)).experts_nk;
    };
    if (sums_) {
      sums_->ahead(decide);
    } else {
      decide();
    }
  }

  const NondeterminismOptions& options_;
  const ModelConfig& config_;
  Mesh mesh_;
  ShardedModel model_;
  ShardedAdamW optimizer_;
  Batch batch_;
  std::optional<ShuffledSums> sums_;
  double loss_ = 0;
  Tensor hidden_;
  std::map<int64_t, Tensor> experts_;
};

// Sums of squares, of both the difference and the first.
struct Squares {
  double difference = 0, first = 0;
  void add(const Tensor& a, const Tensor& b) {
    difference += (a.detach() - b.detach()).square_().sum(at::kDouble).item<double>();
    first += a.detach().square().sum(at::kDouble).item<double>();
  }
  double relative() const { return difference == 0 ? 0 : std::sqrt(difference / first); }
};

Apart compare(const Twin& a, const Twin& b, int64_t step, int64_t sequence, std::optional<Flip>& first_flip) {
  Squares output, weights;
  output.add(a.hidden(), b.hidden());
  for (size_t i = 0; i < a.weights().size(); ++i) weights.add(*a.weights()[i].tensor, *b.weights()[i].tensor);
  Apart apart{.loss = a.loss(),
              .loss_difference = std::abs(a.loss() - b.loss()),
              .output = output.relative(),
              .weights = weights.relative()};
  for (const auto& [layer, experts_nk] : a.experts()) {
    const Tensor flipped = experts_nk.ne(b.experts().at(layer)).any(1).nonzero();
    apart.flips += flipped.size(0);
    if (flipped.size(0) == 0 || first_flip) continue;
    const int64_t token = flipped[0].item<int64_t>();
    first_flip = Flip{.step = step, .layer = layer, .sequence = token / sequence, .position = token % sequence};
  }
  return apart;
}

double factor(double now, std::vector<double> before) {
  const double median = spread_of(std::move(before)).median;
  return median > 0 ? now / median : 0;
}

std::optional<TwinRun::Jump> jump_at(const std::vector<Apart>& steps, int64_t flip) {
  if (flip < 2) return std::nullopt;
  std::vector<double> loss, output;
  for (size_t i = flip - 1; i-- > 0 && loss.size() < kStepsBefore;) {
    loss.push_back(steps[i].loss_difference);
    output.push_back(steps[i].output);
  }
  return TwinRun::Jump{.loss = factor(steps[flip - 1].loss_difference, loss),
                       .output = factor(steps[flip - 1].output, output)};
}

// No difference means anything from there on.
void require_finite(const Apart& apart, const std::string& model, int64_t step) {
  if (std::isfinite(apart.loss + apart.loss_difference + apart.output + apart.weights)) return;
  throw Error(1, fmt::format("step {}: the {} twins diverged, loss {}; expected finite losses and weights (--lr)", step,
                             model, apart.loss));
}

// Of the larger model's twins: weights, their gradients and what AdamW keeps, fp32.
void require_memory(const ModelConfig& experts, at::ScalarType dtype) {
  const auto memory = static_cast<double>(memory_limit());
  const double wanted =
      2 * static_cast<double>(count_parameters(experts).total) * static_cast<double>(c10::elementSize(dtype) + 4 + 12);
  if (wanted <= memory) return;
  throw ConfigError("model: expected two in training to fit in this machine's memory of {}, got {} for {}",
                    format_bytes(memory), format_bytes(wanted), experts.name);
}

TwinRun run_pair(const NondeterminismOptions& options, const ModelConfig& config, bool shuffled,
                 const RankRunner& run_twins, const std::function<void(const std::string&)>& observe) {
  TwinRun run;
  run.model = config.moe ? "experts" : "dense";
  run.shuffled = shuffled;
  std::array<const Twin*, 2> twins;
  run_twins([&](Communicator& pair) {
    PARLAT_ASSERT(pair.size() == 2, "{} twins", pair.size());
    const std::unique_ptr<Communicator> alone = pair.split(pair.rank());
    std::optional<uint64_t> order_seed;
    if (shuffled) order_seed = derive_seed(options.seed, fmt::format("order of twin {}", pair.rank()));
    Twin twin(options, config, order_seed, *alone);
    twins[pair.rank()] = &twin;
    for (int64_t step = 1; step <= options.steps; ++step) {
      twin.step();
      pair.barrier("twins' step");
      if (pair.rank() == 0) {
        run.steps.push_back(compare(*twins[0], *twins[1], step, options.sequence, run.first_flip));
        require_finite(run.steps.back(), run.model, step);
        observe(fmt::format("{}, {}, loss {:.4f}", run.model, shuffled ? "drawn orders" : "deterministic",
                            run.steps.back().loss));
      }
      pair.barrier("twins compared");
    }
  });
  if (run.first_flip) run.jump = jump_at(run.steps, run.first_flip->step);
  return run;
}

// A product as deep as the model is wide: two sums of that depth, in two orders, are compared.
void verify(const NondeterminismOptions& options, NondeterminismResult& result) {
  const ModelConfig& config = options.experts;
  const int64_t depth = config.mla.dims.d_model;
  const Tensor x = seeded_normal({options.sequence, depth}, 1, options.seed, "x", options.dtype);
  const Tensor w = seeded_normal({config.d_mlp, depth}, 1, options.seed, "w", options.dtype);
  const Tensor plain = parlat::linear(x, w);
  ShuffledSums sums(options.seed);
  const ShuffledSums::Scope scope(sums);
  const Tensor shuffled = parlat::linear(x, w);
  const Tolerance tolerance = Tolerance::rounding(options.dtype, depth, 2);
  const Comparison compared = compare(shuffled, plain, tolerance);
  result.max_error = compared.relative;
  result.tolerance = tolerance.relative_to_norm;
  result.ok = compared.close && compared.max_error > 0;
}

}  // namespace

Apart TwinRun::last() const {
  Apart last;
  const size_t n = std::max<size_t>(steps.size() / 10, 1);
  const double share = 1.0 / static_cast<double>(n);
  for (size_t i = steps.size() - n; i < steps.size(); ++i) {
    last.loss += share * steps[i].loss;
    last.loss_difference += share * steps[i].loss_difference;
    last.output += share * steps[i].output;
    last.weights += share * steps[i].weights;
  }
  for (const Apart& apart : steps) last.flips += apart.flips;
  return last;
}

TwinModels twin_models(ModelConfig experts) {
  if (!experts.moe) throw ConfigError("model: expected one with experts, got {}", experts.name);
  experts.d_mlp = experts.moe->d_expert * (experts.moe->experts_per_token + experts.moe->n_shared);
  TwinModels models{.experts = experts, .dense = experts};
  models.dense.moe.reset();
  return models;
}

NondeterminismResult bench_nondeterminism(const NondeterminismOptions& options, const RankRunner& run_twins,
                                          const std::function<void(const std::string&)>& observe) {
  if (compute_dtype(options.dtype) != options.dtype) {
    throw ConfigError("dtype: expected fp32 or fp64, whose sums are as wide, got {}", name(options.dtype));
  }
  const TwinModels models = twin_models(options.experts);
  require_memory(models.experts, options.dtype);
  NondeterminismResult result;
  run_twins([&](Communicator& pair) {
    if (pair.rank() == 0) verify(options, result);
  });
  for (const bool shuffled : {true, false}) {
    for (const ModelConfig* config : {&models.dense, &models.experts}) {
      result.runs.push_back(run_pair(options, *config, shuffled, run_twins, observe));
    }
  }
  return result;
}

namespace {

nlohmann::json to_json(const Apart& apart) {
  return {{"loss", apart.loss},
          {"loss_difference", apart.loss_difference},
          {"output_difference", apart.output},
          {"weight_difference", apart.weights},
          {"flips", apart.flips}};
}

}  // namespace

nlohmann::json to_json(const NondeterminismResult& result) {
  nlohmann::json rows = nlohmann::json::array();
  for (const TwinRun& run : result.runs) {
    nlohmann::json row = {{"model", run.model}, {"order", run.shuffled ? "drawn" : "deterministic"}};
    for (const Apart& apart : run.steps) row["steps"].push_back(to_json(apart));
    row["last"] = to_json(run.last());
    if (const auto& flip = run.first_flip) {
      row["first_flip"] = {
          {"step", flip->step}, {"layer", flip->layer}, {"sequence", flip->sequence}, {"position", flip->position}};
    }
    if (run.jump) row["jump"] = {{"loss", run.jump->loss}, {"output", run.jump->output}};
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace parlat
