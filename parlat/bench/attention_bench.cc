#include "parlat/bench/attention_bench.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "parlat/base/error.h"
#include "parlat/bench/published_attention.h"
#include "parlat/kernels/eager_attention.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/plan/flops.h"
#include "parlat/tensor/memory_meter.h"
#include "parlat/tensor/meta_device.h"
#include "parlat/train/forms.h"
#include "parlat/train/step_record.h"

namespace parlat {

namespace {

using Clock = std::chrono::steady_clock;

// One form on one rank, ready to run.
class RankPass {
 public:
  RankPass(TrainForm form, const AttentionBenchOptions& options, const RankLayer& local, Communicator& comm)
      : attention_(make(form, options, local.weights.dims(), comm)),
        local_(local),
        backward_(options.backward),
        holds_out_(options.as_published),
        comm_(comm) {}

  // Returns what the forward pass sent.
  Traffic run() const {
    const c10::AutoGradMode grad_mode(backward_);
    const Traffic before = comm_.traffic();
    Tensor out = attention_->forward(local_.weights, local_.x_BSD, local_.tokens);
    const Traffic forward = comm_.traffic() - before;
    const Tensor held = holds_out_ ? out : Tensor();
    if (backward_) run_backward(std::move(out));
    return forward;
  }

  void clear_gradients() const {
    for (const auto& [name, leaf] : local_.leaves()) {
      leaf.mutable_grad() = Tensor();
      if (leaf.requires_grad()) sum_gradients(leaf, {});
    }
  }

  // Memory of a training step after its first: gradients exist and are added to, those of weights in fp32.
  void zero_gradients() const {
    for (const auto& [name, leaf] : local_.leaves()) {
      if (!leaf.requires_grad()) continue;
      if (name == "x") {
        leaf.mutable_grad() = at::zeros_like(leaf);
      } else {
        sum_gradients(leaf, at::zeros(leaf.sizes(), leaf.options().dtype(compute_dtype(leaf.scalar_type()))));
      }
    }
  }

 private:
  // Through out's graph, which is enough: out is free unless somebody else holds it.
  void run_backward(Tensor out) const {
    const torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(out);
    out.reset();
    torch::autograd::Engine::get_default_engine().execute({edge}, {local_.grad_out_BSD}, /*keep_graph=*/false,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true);
  }

  static std::unique_ptr<Attention> make(TrainForm form, const AttentionBenchOptions& options, const MlaDims& dims,
                                         Communicator& comm) {
    if (options.as_published) return std::make_unique<PublishedAttention>(form, comm, dims, options.attention);
    return make_attention(form, comm, dims, options.attention);
  }

  std::unique_ptr<Attention> attention_;
  const RankLayer& local_;
  bool backward_;
  bool holds_out_;  // as a script does; a model adds it to the residual stream and keeps the sum alone
  Communicator& comm_;
};

SentBytes max_over_ranks(const SentBytes& sent, Communicator& comm) {
  const auto largest = [&](int64_t bytes) {
    return static_cast<int64_t>(comm.max_over_ranks(static_cast<double>(bytes), "bytes sent"));
  };
  return {.all_to_all = largest(sent.all_to_all),
          .all_gather = largest(sent.all_gather),
          .reduce_scatter = largest(sent.reduce_scatter),
          .all_reduce = largest(sent.all_reduce),
          .send_recv = largest(sent.send_recv)};
}

// The sites of the first rank whose peak is `largest`, on every rank.
std::vector<MemoryMeter::Site> sites_of_largest(const MemoryMeter& meter, int64_t largest, Communicator& comm) {
  const bool mine = meter.peak_bytes() == largest;
  const auto owner = static_cast<int>(-comm.max_over_ranks(mine ? -comm.rank() : -comm.size(), "rank of the peak"));
  nlohmann::json sites = nlohmann::json::array();
  for (const MemoryMeter::Site& site : meter.peak_sites()) sites.push_back({site.name, site.bytes});
  std::string text = comm.rank() == owner ? sites.dump() : "";
  text.resize(static_cast<size_t>(comm.max_over_ranks(static_cast<double>(text.size()), "length of the sites")));
  comm.broadcast(at::from_blob(text.data(), {static_cast<int64_t>(text.size())}, at::kByte), owner, "sites").wait();
  std::vector<MemoryMeter::Site> all;
  for (const nlohmann::json& site : nlohmann::json::parse(text)) {
    all.push_back({site.at(0).get<std::string>(), site.at(1).get<int64_t>()});
  }
  return all;
}

// One untimed pass, which also warms up: its peak memory and traffic go to `row`.
void measure_memory_and_traffic(const RankPass& pass, const AttentionBenchOptions& options, Communicator& comm,
                                AttentionBenchRow& row) {
  if (options.backward && !options.as_published) pass.zero_gradients();
  MemoryMeter meter(/*with_sites=*/true);
  Traffic forward, whole;
  {
    const MemoryMeter::Scope scope(meter);
    const Traffic before = comm.traffic();
    forward = pass.run();
    whole = comm.traffic() - before;
  }
  pass.clear_gradients();
  const auto largest = [&](int64_t value, const char* what) {
    return static_cast<int64_t>(comm.max_over_ranks(static_cast<double>(value), what));
  };
  row.peak_activation_bytes = largest(meter.peak_bytes(), "peak memory");
  row.peak_sites = sites_of_largest(meter, row.peak_activation_bytes, comm);
  row.paper_bytes = largest(forward.paper_bytes(), "bytes sent");
  row.sent_forward = max_over_ranks(sent_bytes(forward), comm);
  row.sent = max_over_ranks(sent_bytes(whole), comm);
}

double timed_pass_ms(const RankPass& pass, Communicator& comm) {
  pass.clear_gradients();
  comm.barrier("start of a timed pass");
  const auto start = Clock::now();
  pass.run();
  const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  return comm.max_over_ranks(ms, "time of a pass");
}

void stop_gradients_of_weights(const RankLayer& local) {
  for (const auto& [name, leaf] : local.leaves()) leaf.set_requires_grad(name == "x" && leaf.requires_grad());
}

// Fills everything of `rows` (one a form) but the check. Called by every rank, with rows of its own.
void measure_rank(const LayerCase& layer, const AttentionBenchOptions& options, Communicator& comm,
                  std::vector<AttentionBenchRow>& rows) {
  const RankLayer local = rank_layer(layer, options.backward, comm);
  const bool fused = options.attention.kernel == AttentionKernel::kFused;
  if (options.as_published && fused) stop_gradients_of_weights(local);  // published_attention.h
  std::vector<RankPass> passes;
  for (const TrainForm form : options.forms) passes.emplace_back(form, options, local, comm);
  for (size_t i = 0; i < passes.size(); ++i) {
    rows[i].ranks = comm.size();
    measure_memory_and_traffic(passes[i], options, comm, rows[i]);
  }
  if (options.dry_run) return;
  std::vector<std::vector<double>> ms(passes.size());
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    // Each repeat starts with another form, so that none always follows the same one.
    for (size_t i = 0; i < passes.size(); ++i) {
      const size_t at = (i + repeat) % passes.size();
      ms[at].push_back(timed_pass_ms(passes[at], comm));
    }
  }
  for (size_t i = 0; i < passes.size(); ++i) {
    rows[i].ms = spread_of(ms[i]);
    rows[i].tokens_per_s = static_cast<double>(layer.batch() * layer.sequence()) / rows[i].ms.median * 1e3;
  }
}

LayerCase case_of(const AttentionBenchOptions& options, const MlaWeights& weights, int64_t sequence) {
  return make_layer_case(weights, {.batch = options.batch,
                                   .sequence = sequence,
                                   .documents = options.documents,
                                   .sharding = options.sharding,
                                   .seed = options.seed});
}

std::vector<AttentionBenchRow> verify_cell(const AttentionBenchOptions& options, const MlaWeights& weights,
                                           std::vector<AttentionBenchRow> rows, const RankRunner& run_ranks) {
  const int64_t sequence = rows.front().sequence;
  const int64_t length = options.verify_sequence > 0 ? std::min(sequence, options.verify_sequence)
                                                     : verification_length(weights.dims(), options.batch, sequence);
  const LayerCase verified = case_of(options, weights, length);
  const OracleResult want = oracle_of(verified);
  return run_and_keep(run_ranks, rows, [&](Communicator& comm, std::vector<AttentionBenchRow>& mine) {
    for (AttentionBenchRow& row : mine) {
      row.verified_sequence = length;
      row.check = check_form(row.form, options.attention, verified, want, comm);
    }
  });
}

std::vector<AttentionBenchRow> bench_cell(const AttentionBenchOptions& options, const MlaWeights& weights,
                                          int64_t sequence, const RankRunner& run_ranks) {
  std::vector<AttentionBenchRow> rows;
  for (const TrainForm form : options.forms) {
    AttentionBenchRow& row = rows.emplace_back();
    row.form = form;
    row.sequence = sequence;
    row.heads = weights.dims().n_heads;
  }
  if (!options.dry_run) rows = verify_cell(options, weights, std::move(rows), run_ranks);
  const LayerCase layer = case_of(options, weights, sequence);
  return run_and_keep(run_ranks, rows, [&](Communicator& comm, std::vector<AttentionBenchRow>& mine) {
    measure_rank(layer, options, comm, mine);
  });
}

}  // namespace

int64_t verification_length(const MlaDims& dims, int64_t batch, int64_t sequence) {
  constexpr double kFlops = 5e10;  // of two seconds of one core in fp64, roughly
  // Backward costs twice the forward pass, and the oracle computes masked scores as well.
  const auto flops = [&](int64_t tokens) {
    const AttentionFlops one = attention_flops(dims, {tokens});
    return 3 * static_cast<double>(batch) * (one.projections + 2 * one.attention);
  };
  int64_t length = 2 * kEagerBlockRows + 1;
  while (length < sequence && flops(length + kEagerBlockRows) <= kFlops) length += kEagerBlockRows;
  return std::min(length, sequence);
}

std::vector<AttentionBenchRow> bench_attention(const AttentionBenchOptions& options, const RankRunner& run_ranks,
                                               const BenchObserver& observe) {
  PARLAT_ASSERT(options.repeats > 0 && !options.forms.empty(), "{} repeats of {} forms", options.repeats,
                options.forms.size());
  if (options.dry_run) prepare_meta_device();
  std::vector<AttentionBenchRow> rows;
  const std::vector<int64_t> own_heads = {options.spec.dims.n_heads};
  for (const int64_t heads : options.heads.empty() ? own_heads : options.heads) {
    MlaSpec spec = options.spec;
    spec.dims.n_heads = heads;
    const MlaWeights weights =
        random_mla_weights(spec, options.seed, options.dtype, options.dry_run ? at::kMeta : at::kCPU);
    for (const int64_t sequence : options.sequences) {
      if (observe) observe(fmt::format("{} heads, {} tokens", heads, sequence));
      const std::vector<AttentionBenchRow> cell = bench_cell(options, weights, sequence, run_ranks);
      rows.insert(rows.end(), cell.begin(), cell.end());
    }
  }
  return rows;
}

nlohmann::json to_json(const AttentionBenchRow& row, const AttentionBenchOptions& options) {
  nlohmann::json json = {{"form", name(row.form)},
                         {"kernel", name(options.attention.kernel)},
                         {"save", name(options.attention.save)},
                         {"ranks", row.ranks},
                         {"sequence", row.sequence},
                         {"batch", options.batch},
                         {"documents", options.documents},
                         {"heads", row.heads},
                         {"d_model", options.spec.dims.d_model},
                         {"dtype", name(options.dtype)},
                         {"sharding", name(options.sharding)},
                         {"pass", options.backward ? "forward+backward" : "forward"},
                         {"dry_run", options.dry_run},
                         {"sent_bytes", to_json(row.sent)},
                         {"sent_bytes_forward", to_json(row.sent_forward)},
                         {"paper_bytes", row.paper_bytes},
                         {"peak_activation_bytes", row.peak_activation_bytes},
                         {"peak_sites", to_json(row.peak_sites)}};
  if (options.as_published) json["as_published"] = true;
  if (passes_latents(row.form)) json["groups"] = ring_groups(row.form, row.ranks, row.heads, options.attention);
  if (options.dry_run) return json;
  json.update({{"ms", to_json(row.ms)},
               {"tokens_per_s", row.tokens_per_s},
               {"max_error", row.check.max_error},
               {"tolerance", row.check.tolerance},
               {"worst_tensor", row.check.worst},
               {"verified_sequence", row.verified_sequence},
               {"ok", row.check.ok}});
  if (!row.check.ok) json["error"] = row.check.text();
  return json;
}

}  // namespace parlat
