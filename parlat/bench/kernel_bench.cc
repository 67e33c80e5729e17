#include "parlat/bench/kernel_bench.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "parlat/base/error.h"
#include "parlat/base/memory_limit.h"
#include "parlat/base/units.h"
#include "parlat/kernels/eager_attention.h"
#include "parlat/kernels/fused_attention.h"
#include "parlat/kernels/gemm.h"
#include "parlat/mla/documents.h"
#include "parlat/tensor/compare.h"
#include "parlat/tensor/fill.h"
#include "parlat/train/gemm_rate.h"

namespace parlat {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kVerifiedTokens = 700;

// One sequence: q, latent and the rows of kv_b_proj, and the keys and values that they give, as leaves.
struct Case {
  Tensor q, k, v, latent, w_ukv, grad;
  KeyRanges visible;
  double scale;
};

struct KeysAndValues {
  Tensor k, v;
};

// Written out for all heads, products in the dtype of the arithmetic.
KeysAndValues write_out(const Tensor& latent, const Tensor& w_ukv, const MlaDims& d) {
  const at::ScalarType compute = compute_dtype(latent.scalar_type());
  const Tensor kv = at::matmul(latent.narrow(2, 0, d.d_latent).to(compute), w_ukv.to(compute).t())
                        .to(latent.scalar_type())
                        .unflatten(2, {d.n_heads, d.d_nope + d.d_v});
  const Tensor k_rope = latent.narrow(2, d.d_latent, d.d_rope).unsqueeze(2).expand({-1, -1, d.n_heads, -1});
  return {at::cat({kv.narrow(3, 0, d.d_nope), k_rope}, 3), kv.narrow(3, d.d_nope, d.d_v).contiguous()};
}

Case make_case(const MlaDims& d, int64_t n, at::ScalarType dtype, uint64_t seed) {
  const auto random = [&](at::IntArrayRef shape, double deviation, const char* name) {
    return seeded_normal(shape, deviation, seed, name, dtype);
  };
  Case c{.q = random({1, n, d.n_heads, d.d_qk()}, 1, "q"),
         .k = {},
         .v = {},
         .latent = random({1, n, d.d_cache()}, 1, "latent"),
         .w_ukv = random({d.n_heads * (d.d_nope + d.d_v), d.d_latent}, 1 / std::sqrt(d.d_latent), "w_ukv"),
         .grad = random({1, n, d.n_heads, d.d_v}, 1, "grad"),
         .visible = Documents::whole(1, n).visible(/*causal=*/true),
         .scale = 1 / std::sqrt(d.d_qk())};
  const KeysAndValues written = write_out(c.latent, c.w_ukv, d);
  c.k = written.k;
  c.v = written.v;
  for (Tensor* leaf : {&c.q, &c.k, &c.v, &c.latent, &c.w_ukv}) leaf->requires_grad_();
  return c;
}

struct Kernel {
  const char* name;
  bool from_latents;
  std::function<Tensor(const Case&)> attend;
  std::vector<Tensor> inputs(const Case& c) const {
    return from_latents ? std::vector<Tensor>{c.q, c.latent, c.w_ukv} : std::vector<Tensor>{c.q, c.k, c.v};
  }
};

Tensor torch_attention(const Case& c, bool padded) {
  const auto heads_first = [](const Tensor& x) { return x.transpose(1, 2).contiguous(); };
  const Tensor v = padded ? at::constant_pad_nd(c.v, {0, c.k.size(3) - c.v.size(3)}) : c.v;
  const Tensor out = at::scaled_dot_product_attention(heads_first(c.q), heads_first(c.k), heads_first(v), {}, 0.0,
                                                      /*is_causal=*/true, c.scale);
  return out.narrow(3, 0, c.v.size(3)).transpose(1, 2);
}

std::vector<Kernel> all_kernels() {
  return {
      {"fused", false, [](const Case& c) { return fused_attention(c.q, c.k, c.v, c.visible, c.scale); }},
      {"fused from latents", true,
       [](const Case& c) { return fused_latent_attention(c.q, c.latent, c.w_ukv, c.visible, c.scale); }},
      {"eager", false, [](const Case& c) { return eager_attention(c.q, c.k, c.v, c.visible, c.scale); }},
      {"torch", false, [](const Case& c) { return torch_attention(c, false); }},
      {"torch padded", false, [](const Case& c) { return torch_attention(c, true); }},
  };
}

std::vector<Kernel> chosen_kernels(const std::vector<std::string>& names) {
  std::vector<Kernel> kernels = all_kernels();
  std::erase_if(kernels, [&](const Kernel& kernel) {
    return !names.empty() && std::find(names.begin(), names.end(), kernel.name) == names.end();
  });
  return kernels;
}

// Inputs, results and their gradients, twice where copies have heads first; scores where all are written: three of them
// with their gradients, two without.
void require_memory(const Kernel& kernel, const KernelBenchOptions& options) {
  const MlaDims& d = options.dims;
  const auto n = static_cast<double>(options.sequence), heads = static_cast<double>(d.n_heads);
  const auto size = static_cast<double>(c10::elementSize(options.dtype));
  const double rows = 4 * n * heads * static_cast<double>(2 * d.d_qk() + 2 * d.d_v) * size;
  const double scores =
      std::string_view(kernel.name) == "torch" ? (options.backward ? 3 : 2) * n * n * heads * size : 0;
  const auto memory = static_cast<double>(memory_limit());
  if (rows + scores <= memory) return;
  throw ConfigError("kernel {}: expected {} heads of {} tokens to fit in {}, got {}{}", kernel.name, d.n_heads,
                    options.sequence, format_bytes(memory), format_bytes(rows + scores),
                    scores > 0 ? ", nearly all of it scores (--kernels leaves it out)" : "");
}

std::vector<Tensor> run(const Kernel& kernel, const Case& c, bool backward) {
  const at::AutoGradMode grad_mode(backward);
  std::vector<Tensor> results = {kernel.attend(c)};
  if (backward) {
    for (const Tensor& grad : torch::autograd::grad({results[0]}, kernel.inputs(c), {c.grad})) results.push_back(grad);
  }
  return results;
}

Tensor exact_leaf(const Tensor& x) { return x.detach().to(at::kDouble).requires_grad_(); }

// The definition in fp64: keys and values written out, so that their gradients reach latents and weights.
std::vector<Tensor> exact(bool from_latents, const Case& c, const MlaDims& d) {
  Case wide = c;
  for (auto [to, from] : {std::pair{&wide.q, &c.q},
                          {&wide.k, &c.k},
                          {&wide.v, &c.v},
                          {&wide.latent, &c.latent},
                          {&wide.w_ukv, &c.w_ukv}}) {
    *to = exact_leaf(*from);
  }
  wide.grad = c.grad.to(at::kDouble);
  const Kernel definition{"definition", from_latents, [&](const Case& in) {
                            if (!from_latents) return eager_attention(in.q, in.k, in.v, in.visible, in.scale);
                            const KeysAndValues written = write_out(in.latent, in.w_ukv, d);
                            return eager_attention(in.q, written.k, written.v, in.visible, in.scale);
                          }};
  return run(definition, wide, true);
}

// Up to 7 stages from the inputs to a weight's gradient, over sums as long as the sequence and all heads.
void verify(const Kernel& kernel, const Case& c, const std::vector<Tensor>& want, Tolerance tolerance,
            KernelBenchRow& row) {
  const std::vector<Tensor> got = run(kernel, c, true);
  row.ok = true;
  row.tolerance = tolerance.relative_to_norm;
  for (size_t i = 0; i < got.size(); ++i) {
    // Kernels that save a rounded output err by its rounding in small rows, too: those are held against the largest.
    Scale scale = scale_of(want[i]);
    scale.rms = scale.max;
    const Comparison compared = compare(got[i], want[i], tolerance, scale);
    row.max_error = std::max(row.max_error, compared.relative);
    row.ok = row.ok && compared.close;
  }
}

void verify_all(const std::vector<Kernel>& kernels, const KernelBenchOptions& options,
                std::vector<KernelBenchRow>& rows) {
  const int64_t n = std::min(options.sequence, kVerifiedTokens);
  const Case c = make_case(options.dims, n, options.dtype, options.seed);
  const Tolerance tolerance = Tolerance::rounding(options.dtype, n * options.dims.n_heads, 7);
  const std::vector<Tensor> of_keys = exact(false, c, options.dims), of_latents = exact(true, c, options.dims);
  for (size_t i = 0; i < kernels.size(); ++i) {
    verify(kernels[i], c, kernels[i].from_latents ? of_latents : of_keys, tolerance, rows[i]);
  }
}

double timed_ms(const Kernel& kernel, const Case& c, bool backward) {
  const auto start = Clock::now();
  run(kernel, c, backward);
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void count_flops(const KernelBenchOptions& options, bool from_latents, KernelBenchRow& row) {
  const MlaDims& d = options.dims;
  const auto n = static_cast<double>(options.sequence), heads = static_cast<double>(d.n_heads);
  const double pairs = n * (n + 1) / 2 * heads, forward = 2.0 * static_cast<double>(d.d_qk() + d.d_v);
  const double backward = 2.0 * static_cast<double>(3 * d.d_qk() + 2 * d.d_v);
  row.attention_flops = pairs * (forward + (options.backward ? backward : 0));
  const double up = 2 * n * heads * static_cast<double>((d.d_nope + d.d_v) * d.d_latent);
  if (from_latents) row.up_projection_flops = up * (options.backward ? 4 : 1);
}

}  // namespace

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernel& kernel : all_kernels()) names.emplace_back(kernel.name);
  return names;
}

void require_memory(const KernelBenchOptions& options) {
  for (const Kernel& kernel : chosen_kernels(options.kernels)) require_memory(kernel, options);
}

std::vector<KernelBenchRow> bench_kernels(const KernelBenchOptions& options) {
  const std::vector<Kernel> kernels = chosen_kernels(options.kernels);
  std::vector<KernelBenchRow> rows(kernels.size());
  for (size_t i = 0; i < kernels.size(); ++i) {
    rows[i].kernel = kernels[i].name;
    count_flops(options, kernels[i].from_latents, rows[i]);
  }
  verify_all(kernels, options, rows);
  const Case c = make_case(options.dims, options.sequence, options.dtype, options.seed);
  std::vector<std::vector<double>> ms(kernels.size());
  std::vector<double> gemm;
  for (int repeat = 0; repeat < options.repeats + 1; ++repeat) {
    for (size_t i = 0; i < kernels.size(); ++i) {
      const size_t at = (i + repeat) % kernels.size();
      gemm.push_back(measure_gemm_rate(options.dtype));
      const double time = timed_ms(kernels[at], c, options.backward);
      if (repeat > 0) ms[at].push_back(time);  // the first warms up
    }
  }
  for (size_t i = 0; i < kernels.size(); ++i) {
    rows[i].ms = spread_of(ms[i]);
    rows[i].gemm_flops_per_s = spread_of(gemm).median;
  }
  return rows;
}

nlohmann::json to_json(const KernelBenchRow& row, const KernelBenchOptions& options) {
  const double seconds = row.ms.median / 1e3;
  return {{"kernel", row.kernel},
          {"sequence", options.sequence},
          {"heads", options.dims.n_heads},
          {"dtype", name(options.dtype)},
          {"pass", options.backward ? "forward+backward" : "forward"},
          {"ms", to_json(row.ms)},
          {"attention_flops", row.attention_flops},
          {"up_projection_flops", row.up_projection_flops},
          {"attention_flops_per_s", row.attention_flops / seconds},
          {"flops_per_s", (row.attention_flops + row.up_projection_flops) / seconds},
          {"gemm_flops_per_s", row.gemm_flops_per_s},
          {"of_gemm_rate", row.of_gemm_rate()},
          {"max_error", row.max_error},
          {"tolerance", row.tolerance},
          {"ok", row.ok}};
}

}  // namespace parlat
