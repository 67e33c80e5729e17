#include "parlat/bench/calibrate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>

#include "parlat/base/error.h"
#include "parlat/base/spread.h"
#include "parlat/bench/attention_bench.h"
#include "parlat/bench/comm_bench.h"
#include "parlat/kernels/decode_attention.h"
#include "parlat/kernels/eager_attention.h"
#include "parlat/kernels/fused_attention.h"
#include "parlat/kernels/gemm.h"
#include "parlat/mla/documents.h"
#include "parlat/tensor/fill.h"

namespace parlat {

namespace {

constexpr int64_t kHeads = 4;
constexpr const char* kWhat = "calibrate";

// Measures on one rank while the others do the same.
class Bench {
 public:
  Bench(const CalibrateOptions& options, Communicator& comm) : options_(options), comm_(comm) {}

  // Seconds of body(), the slowest rank's, the best of several: other programs only add to it. Each is of as many calls
  // as take what a scheduler gives a thread at once: ranks that share a core would else have it alone, one after
  // another.
  double seconds(const std::function<void()>& body) const {
    constexpr double kSample = 0.02;
    const double warm_up = seconds_of(body, 1);
    const int calls = std::clamp(static_cast<int>(kSample / warm_up), 1, 1000);
    std::vector<double> samples;
    for (int i = 0; i < (options_.quick ? 3 : 7); ++i) samples.push_back(seconds_of(body, calls));
    return spread_of(samples).min / calls;
  }

  Tensor random(at::IntArrayRef shape, at::ScalarType dtype) const {
    return seeded_normal(shape, 1, static_cast<uint64_t>(comm_.rank()), kWhat, dtype);
  }

  // [n, width] [width, width]: n is the smallest dimension.
  RateCurve gemm_rates(at::ScalarType dtype) const {
    constexpr int64_t kWidth = 1024;
    const at::NoGradGuard no_grad;
    RateCurve curve;
    for (const int64_t n : {int64_t{16}, int64_t{64}, int64_t{256}, kWidth}) {
      const Tensor a = random({n, kWidth}, dtype), b = random({kWidth, kWidth}, dtype);
      const Tensor c = at::empty({n, kWidth}, dtype);
      const double taken = seconds([&] { gemm(a, b, c); });
      curve.sizes.push_back(static_cast<double>(n));
      curve.rates.push_back(2 * static_cast<double>(n * kWidth * kWidth) / taken);
    }
    return curve;
  }

  using Kernel = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const KeyRanges&, double);
  KernelRate kernel_rate(Kernel attend, at::ScalarType dtype, bool recomputes) const {
    const MlaDims& d = options_.dims;
    const int64_t n = options_.quick ? 512 : 1024;
    Tensor q = random({1, n, kHeads, d.d_qk()}, dtype), k = random({1, n, kHeads, d.d_qk()}, dtype);
    Tensor v = random({1, n, kHeads, d.d_v}, dtype);
    for (Tensor* const leaf : {&q, &k, &v}) leaf->requires_grad_();
    const KeyRanges visible = Documents::whole(1, n).visible(/*causal=*/true);
    const Tensor grad = random({1, n, kHeads, d.d_v}, dtype);
    const double scale = 1 / std::sqrt(static_cast<double>(d.d_qk()));
    Tensor out;
    const double forward = seconds([&] { out = attend(q, k, v, visible, scale); });
    const double backward = seconds([&] { torch::autograd::grad({out}, {q, k, v}, {grad}, /*retain_graph=*/true); });
    const auto pairs = static_cast<double>(n * (n + 1) / 2 * kHeads);
    const auto qk = static_cast<double>(d.d_qk()), width = static_cast<double>(d.d_v);
    return {2 * pairs * (qk + width) / forward,
            pairs * (recomputes ? 2 * (3 * qk + 2 * width) : 4 * (qk + width)) / backward};
  }

  // Of 16 heads, the block that shares a row of the cache.
  double decode_rate(at::ScalarType dtype) const {
    constexpr int64_t kDecodeHeads = 16, kPages = 32;
    const MlaDims& d = options_.dims;
    std::vector<int32_t> pages(kPages);
    std::iota(pages.begin(), pages.end(), 0);
    const int64_t rows = kPages * kPageTokens;
    const PagedLatents cache{.rows_nd = random({rows, d.d_cache()}, dtype), .pages = {pages}, .lengths = {rows}};
    const Tensor q = random({1, kDecodeHeads, d.d_cache()}, at::kFloat);
    const double taken = seconds([&] { decode_attention(q, cache, d.d_rope); });
    return static_cast<double>(2 * kDecodeHeads * rows * (2 * d.d_latent + d.d_rope)) / taken;
  }

  double copy_rate() const {
    constexpr int64_t kFloats = int64_t{16} << 20;
    const Tensor from = at::ones({kFloats}), to = at::empty({kFloats});
    return 2 * static_cast<double>(from.nbytes()) / seconds([&] { to.copy_(from); });
  }

  Link link(Communicator& ranks) const {
    if (ranks.size() == 1) return {.latency_s = 1e-6, .bytes_per_s = copy_rate() / 2};
    const std::vector<int64_t> sizes = {4 * ranks.size(), options_.quick ? 1 << 20 : 8 << 20};
    double latency_s = 0, rate = 0;
    for (const nlohmann::json& row : bench_comm(ranks, {.bytes = sizes, .repeats = options_.quick ? 5 : 10})) {
      if (row.at("collective") != "all_to_all") continue;
      const double taken = row.at("ms").at("min").get<double>() / 1e3;
      if (row.at("bytes") == sizes.front()) {
        latency_s = taken;
      } else {
        rate = row.at("sent_bytes").get<double>() / std::max(taken - latency_s, taken / 2);
      }
    }
    return {.latency_s = latency_s, .bytes_per_s = rate};
  }

  // The share of the shorter that an exchange and products, as many as last about as long, save when they are under way
  // together.
  double overlap() const {
    if (comm_.size() == 1) return 0;
    const at::NoGradGuard no_grad;
    const Tensor shard = at::ones({int64_t{1} << (options_.quick ? 18 : 20)});
    std::vector<Tensor> shards;
    for (int p = 0; p < comm_.size(); ++p) shards.push_back(at::empty_like(shard));
    const Tensor a = at::ones({256, 1024}), b = at::ones({1024, 1024}), c = at::empty({256, 1024});
    const double product = seconds([&] { gemm(a, b, c); });
    const double exchange = seconds([&] { comm_.all_gather(shard, shards, kWhat).wait(); });
    const int products = std::clamp(static_cast<int>(exchange / product), 1, 100);
    const double both = seconds([&] {
      Handle under_way = comm_.all_gather(shard, shards, kWhat);
      for (int i = 0; i < products; ++i) gemm(a, b, c);
      under_way.wait();
    });
    return std::clamp((products * product + exchange - both) / std::min(products * product, exchange), 0.0, 1.0);
  }

 private:
  // Until all ranks are done, since the first began: one that waits for a core begins late.
  double seconds_of(const std::function<void()>& body, int calls) const {
    comm_.barrier(kWhat);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) body();
    comm_.barrier(kWhat);
    return comm_.max_over_ranks(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), kWhat);
  }

  const CalibrateOptions& options_;
  Communicator& comm_;
};

// From what a rank reached beside more ranks than there are cores for, what it reaches beside so many.
void to_full_rate(Machine& machine) {
  const double sharing = static_cast<double>(machine.ranks_per_node) / static_cast<double>(machine.ranks_at_full_rate);
  machine.memory_bytes_per_s *= sharing;
  machine.within.bytes_per_s *= sharing;
  machine.layer_overhead_s /= sharing;
  for (auto& [dtype, curve] : machine.gemm) {
    for (double& rate : curve.rates) rate *= sharing;
  }
  for (auto& [dtype, rates] : machine.attention) {
    for (double* const rate :
         {&rates.fused.forward, &rates.fused.backward, &rates.eager->forward, &rates.eager->backward}) {
      *rate *= sharing;
    }
    if (rates.decode_rate) *rates.decode_rate *= sharing;
  }
}

// A forward pass of laga with hardly any work.
double layer_overhead(const RankRunner& run_ranks, int ranks) {
  AttentionBenchOptions options;
  options.spec.dims = {
      .d_model = 16, .n_heads = ranks, .d_nope = 8, .d_rope = 8, .d_v = 8, .d_latent = 8, .d_q_latent = {}};
  options.sequences = {ranks};
  options.forms = {TrainForm::kLaga};
  options.backward = false;
  return bench_attention(options, run_ranks).at(0).ms.min / 1e3;
}

}  // namespace

Machine calibrate(const CalibrateOptions& options, const RankRunner& run_ranks) {
  Machine measured = run_and_keep(run_ranks, Machine(), [&](Communicator& comm, Machine& machine) {
    if (comm.size() % options.nodes != 0) {
      throw ConfigError("nodes: expected a divisor of the {} ranks, got {}", comm.size(), options.nodes);
    }
    const Bench bench(options, comm);
    const int on_node = comm.size() / options.nodes;
    machine.ranks_per_node = on_node;
    machine.ranks_at_full_rate = std::min<int64_t>(on_node, options.ranks_at_full_rate);
    machine.memory_bytes = options.node_memory_bytes / on_node;
    machine.memory_bytes_per_s = bench.copy_rate();
    machine.overlap = bench.overlap();
    machine.within = bench.link(*comm.split(comm.rank() / on_node));
    if (options.nodes > 1) machine.between = bench.link(*comm.split(comm.rank() % on_node));
    for (const at::ScalarType dtype : options.dtypes) {
      const std::string key(name(dtype));
      machine.gemm[key] = bench.gemm_rates(dtype);
      AttentionRates& rates = machine.attention[key];
      rates.fused = bench.kernel_rate(&fused_attention, dtype, /*recomputes=*/true);
      rates.eager = bench.kernel_rate(&eager_attention, dtype, /*recomputes=*/false);
      if (dtype != at::kDouble) rates.decode_rate = bench.decode_rate(dtype);
    }
  });
  measured.layer_overhead_s = layer_overhead(run_ranks, static_cast<int>(measured.ranks_per_node) * options.nodes);
  to_full_rate(measured);
  return measured;
}

}  // namespace parlat
