#include "parlat/plan/peak.h"

#include <algorithm>

#include "parlat/base/range.h"
#include "parlat/plan/form_time.h"

namespace parlat {

namespace {

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kQueries = KernelBlocks::kQueries, kKeys = KernelBlocks::kKeys;
constexpr int64_t kEagerRows = KernelBlocks::kEagerRows;
constexpr int64_t kPanel = 1024;  // gemm.cc's

// t: tokens of this rank; T (`of_group`) and h: tokens and heads in its group (docs/plan.md).
struct Sizes {
  Sizes(const TrainPlanOptions& options, const FormPlan& plan)
      : d(options.dims),
        form(plan.form),
        groups(rank_groups(plan, options)),
        t(options.batch * even_share(options.sequence, options.ranks, 0).size()),
        of_group(std::min(t * groups.members, options.batch * options.sequence)),
        h(even_share(d.n_heads, groups.members, 0).size()),
        queries(of_group / options.batch),
        element(dtype_bytes(options.dtype)),
        wide(std::max(element, kFp32Bytes)),
        widens(element < wide),
        fused(plan.attention.kernel == AttentionKernel::kFused),
        rebuilds_keys(passes_latents(form) ||
                      ((form == TrainForm::kLaga || form == TrainForm::kLagaQ) && plan.attention.rebuilds_keys())) {}

  const MlaDims& d;
  const TrainForm form;
  const RankGroups groups;
  const int64_t t, of_group, h, queries;  // queries: of one sequence
  const int64_t element, wide;            // bytes; wide: of the arithmetic
  const bool widens, fused, rebuilds_keys;

  int64_t out() const { return t * d.n_heads * d.d_v * element; }
  bool absorbed() const { return form == TrainForm::kAbsorbed; }
  int64_t width_qk() const { return absorbed() ? d.d_cache() : d.d_qk(); }
  int64_t width_v() const { return absorbed() ? d.d_latent : d.d_v; }

  // Of a product [m, k] [k, n].
  int64_t panels(int64_t m, int64_t k, int64_t n) const {
    const auto panel = [](int64_t rows, int64_t columns) { return std::min(rows, kPanel) * std::min(columns, kPanel); };
    return widens ? (panel(m, k) + panel(k, n) + panel(m, n)) * wide : 0;
  }
};

// With a backward pass: what each moment needs besides what is saved, but for at_input.
struct Moments : Sizes {
  using Sizes::Sizes;

  // w_o: the layer's output, or the gradient of its input, and the panels of that product.
  int64_t at_output() const {
    const int64_t heads_out = d.n_heads * d.d_v;
    return t * std::max(heads_out, d.d_model) * element + panels(t, heads_out, d.d_model);
  }

  // Attention's forward pass ends, where latents pass: its output in the dtype of the sums and in its own, of which
  // what is saved has one.
  int64_t at_sums() const {
    return passes_latents(form) ? of_group * h * d.d_v * wide - (groups.members > 1 ? out() : 0) : 0;
  }

  // What one thread of the kernel's backward pass needs: in blocks of the arithmetic's dtype operands, gradients of
  // keys and values, and scores and their gradients; then the gradient of one head's queries.
  int64_t scratch() const {
    const int64_t d_qk = width_qk(), both = d_qk + width_v();
    if (!fused) {
      return (2 * queries * both + std::min(kEagerRows, queries) * (both + d_qk + 2 * queries)) * wide;
    }
    const int64_t w = (d.d_nope + d.d_v) * d.d_latent;
    const int64_t rebuilding = rebuilds_keys ? kKeys * d.d_latent + (widens ? 2 : 1) * w : 0;
    return ((2 * kKeys + kQueries) * both + 2 * kQueries * kKeys + rebuilding + (widens ? queries * d_qk : 0)) * wide;
  }

  // On top of what is saved while attention's backward pass runs, without its scratch. The output, and out, saved for
  // w_o, are no more: the gradient of one of them is there instead.
  int64_t gradients() const {
    const int64_t query = of_group * h * width_qk() * element, along = fused ? of_group * h * wide : 0;
    const bool kept_twice = fused && groups.members > 1;
    if (absorbed()) {
      const int64_t keys_and_values = of_group * (d.d_cache() + d.d_latent);
      return query + keys_and_values * (fused ? wide : element) + along - out();
    }
    const int64_t gone = kept_twice ? out() : 0;
    if (passes_latents(form))
      return query + (widens ? of_group * h * ((d.d_qk() + 31) / 32) : 0) + along + passing() - gone;
    if (rebuilds_keys) return query + of_group * d.d_cache() * wide + along - gone;
    return query + of_group * h * (d.d_qk() + d.d_v) * element + along - gone;
  }

  // Of the latents at hand, gathered, the gradient; shards on their way: latents at hand and the next, gradients of
  // this rank's own, received, and sent on before.
  int64_t passing() const {
    const int64_t n = groups.groups;
    const int64_t gathered = groups.members > 1 ? element : 0;
    const int64_t shards = n < 2 ? 0 : (n > 2 ? 3 : 1) * wide + (n > 3 ? 2 : 1) * element;
    return (of_group * (wide + gathered) + t * shards) * d.d_cache();
  }

  // Sums over heads exist a second time, rounded, when scratch is gone.
  int64_t rounded() const {
    if (!fused || !widens || passes_latents(form)) return 0;
    if (absorbed()) return of_group * (d.d_cache() + d.d_latent) * element;
    return rebuilds_keys ? of_group * d.d_cache() * element : 0;
  }

  int64_t at_attention() const { return gradients() + std::max(scratch(), rounded()); }

  // The gradients of the layer's input from queries and from latents, and their sum, when all else is gone.
  int64_t at_input() const { return 3 * t * d.d_model * element; }
};

// Without a backward pass: a tensor is there until the form's function, or what it calls, is done with it.
struct ForwardMoments : Sizes {
  using Sizes::Sizes;

  int64_t query() const { return of_group * h * d.d_qk() * element; }
  int64_t keys_and_values() const { return of_group * h * (d.d_qk() + d.d_v) * element; }
  int64_t product() const {
    return of_group * h * (d.d_nope + d.d_v) * element;
  }  // which holds them before they are apart
  int64_t attended() const { return of_group * h * d.d_v * element; }
  int64_t lse() const { return fused ? of_group * h * wide : 0; }
  int64_t shard() const { return t * d.d_cache() * element; }
  int64_t gathered() const { return of_group * d.d_cache() * element; }
  int64_t rope() const { return form == TrainForm::kLagaQ ? of_group * d.d_rope * wide : 0; }

  // To the end: what the form's function names beside attention's output.
  int64_t held() const {
    const int64_t beside = form == TrainForm::kExplicit ? keys_and_values() : passes_latents(form) ? shard() : rope();
    return query() + beside;
  }

  // Queries or explicit's keys on their way, or laga-q's queries made: local ones and packed ones with those of all
  // tokens.
  int64_t at_inputs() const {
    const int64_t local = t * d.n_heads * d.d_qk() * element, exchanging = groups.members > 1 ? 2 * local : 0;
    if (form == TrainForm::kExplicit) {
      const int64_t apart = t * d.n_heads * (d.d_nope + d.d_v) * element + shard();
      return 2 * query() + out() + std::max(exchanging, apart);
    }
    const int64_t latents = shard() + (passes_latents(form) ? 0 : gathered());
    if (form != TrainForm::kLagaQ) return query() + exchanging + latents;
    const int64_t width = d.d_q_latent.value();
    const int64_t steps =
        of_group * d.d_rope * (20 + (wide == kFp32Bytes ? kFp32Bytes : 0));  // of rope's table, in fp64
    const int64_t making = query() + rope() + panels(of_group, width, h * d.d_qk());
    return latents + of_group * width * element + std::max(t * width * element + steps, making);
  }

  // What one thread of the kernel needs: operands of a block, scores, and sums of one head that are not the output.
  int64_t scratch() const {
    const int64_t both = width_qk() + width_v();
    if (!fused) return (queries * both + std::min(kEagerRows, queries) * (both + queries)) * wide;
    const int64_t w = (d.d_nope + d.d_v) * d.d_latent;
    const int64_t rebuilding = rebuilds_keys ? kKeys * d.d_latent + (widens ? w : 0) : 0;
    const int64_t sums = widens && !passes_latents(form) ? queries * width_v() : 0;
    return ((kKeys + kQueries) * both + 2 * kQueries * kKeys + rebuilding + sums) * wide;
  }

  int64_t at_attention() const {
    const int64_t kernel = lse() + scratch();
    if (form == TrainForm::kExplicit) return held() + attended() + kernel;
    if (absorbed()) {
      const int64_t latent_heads = of_group * h * (d.d_cache() + d.d_latent) * element;
      return held() + gathered() + latent_heads + std::max(kernel, attended() + panels(of_group, d.d_latent, d.d_v));
    }
    if (passes_latents(form)) {
      const int64_t passing = std::min<int64_t>(groups.groups - 1, 2) * shard() + (groups.members > 1 ? gathered() : 0);
      return held() + of_group * h * d.d_v * wide + lse() + std::max(passing + scratch(), widens ? attended() : 0);
    }
    if (rebuilds_keys) return held() + gathered() + attended() + kernel;
    return held() + gathered() + keys_and_values() + std::max(product(), attended() + kernel);
  }

  // Attention's output on its way back, or w_o.
  int64_t at_output() const {
    const int64_t heads_out = d.n_heads * d.d_v, received = t * (d.n_heads - h) * d.d_v * element;
    const int64_t projecting = t * d.d_model * element + panels(t, heads_out, d.d_model);
    return held() + (groups.members > 1 ? attended() : 0) + out() + std::max(received, projecting);
  }

  int64_t most() const { return std::max({at_inputs(), at_attention(), at_output()}); }
};

}  // namespace

int64_t peak_bytes(const TrainPlanOptions& options, const FormPlan& plan) {
  if (!options.backward) return ForwardMoments(options, plan).most();
  const Moments moments(options, plan);
  return std::max(plan.costs.saved_bytes + std::max({moments.at_output(), moments.at_sums(), moments.at_attention()}),
                  moments.at_input());
}

}  // namespace parlat
