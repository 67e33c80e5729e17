#include "parlat/config/parallel.h"

#include <array>
#include <utility>

#include "parlat/config/names.h"

namespace parlat {

namespace {

constexpr std::array<std::pair<TrainForm, std::string_view>, 6> kForms = {{{TrainForm::kExplicit, "explicit"},
                                                                           {TrainForm::kAbsorbed, "absorbed"},
                                                                           {TrainForm::kLaga, "laga"},
                                                                           {TrainForm::kLagaQ, "laga-q"},
                                                                           {TrainForm::kRing, "ring"},
                                                                           {TrainForm::kHybrid, "hybrid"}}};
constexpr std::array<std::pair<AttentionKernel, std::string_view>, 2> kKernels = {
    {{AttentionKernel::kEager, "eager"}, {AttentionKernel::kFused, "fused"}}};
constexpr std::array<std::pair<SavedKeys, std::string_view>, 2> kSavedKeys = {
    {{SavedKeys::kLatent, "latent"}, {SavedKeys::kAll, "all"}}};
constexpr std::array<std::pair<Sharding, std::string_view>, 2> kShardings = {
    {{Sharding::kContiguous, "contiguous"}, {Sharding::kZigzag, "zigzag"}}};

}  // namespace

const std::vector<TrainForm>& all_train_forms() {
  static const std::vector<TrainForm> kAll = all_in(kForms);
  return kAll;
}

std::string_view name(TrainForm form) { return name_in(kForms, form); }
std::vector<TrainForm> possible_train_forms(bool has_query_latent, AttentionKernel kernel) {
  std::vector<TrainForm> forms = all_train_forms();
  if (!has_query_latent) std::erase(forms, TrainForm::kLagaQ);
  if (kernel != AttentionKernel::kFused) std::erase_if(forms, passes_latents);
  return forms;
}

bool passes_latents(TrainForm form) { return form == TrainForm::kRing || form == TrainForm::kHybrid; }

std::string_view name(AttentionKernel kernel) { return name_in(kKernels, kernel); }
std::string_view name(SavedKeys save) { return name_in(kSavedKeys, save); }
AttentionKernel parse_attention_kernel(std::string_view text) { return parse_in(kKernels, "kernel", text); }
SavedKeys parse_saved_keys(std::string_view text) { return parse_in(kSavedKeys, "save", text); }

std::string_view name(Sharding sharding) { return name_in(kShardings, sharding); }
TrainForm parse_train_form(std::string_view text) { return parse_in(kForms, "form", text); }
Sharding parse_sharding(std::string_view text) { return parse_in(kShardings, "sharding", text); }

int64_t ring_groups(TrainForm form, int64_t sequence_ranks, int64_t n_heads, const AttentionOptions& options) {
  if (form == TrainForm::kHybrid && options.ring_groups > 0) return options.ring_groups;
  if (form == TrainForm::kHybrid) {
    for (int64_t size = 2; size <= n_heads && size < sequence_ranks; ++size) {
      if (sequence_ranks % size == 0) return sequence_ranks / size;
    }
  }
  return sequence_ranks;
}

void validate_head_split(TrainForm form, int64_t sequence_ranks, int64_t n_heads) {
  if (!passes_latents(form) && sequence_ranks > n_heads) {
    throw ConfigError("form {}: expected at most {} sequence ranks, since it splits the {} heads over them, got {}",
                      name(form), n_heads, n_heads, sequence_ranks);
  }
}

void validate_form(TrainForm form, int64_t sequence_ranks, int64_t n_heads, bool has_query_latent,
                   const AttentionOptions& options) {
  validate_head_split(form, sequence_ranks, n_heads);
  if (form == TrainForm::kLagaQ && !has_query_latent) {
    throw ConfigError("form {}: expected a model with a query latent (q_lora_rank), which it gathers, got none",
                      name(form));
  }
  if (passes_latents(form) && options.kernel != AttentionKernel::kFused) {
    throw ConfigError("form {}: expected kernel fused, since keys pass by in parts, got {}", name(form),
                      name(options.kernel));
  }
  if (form != TrainForm::kHybrid) return;
  const int64_t groups = options.ring_groups;
  if (groups < 0 || (groups > 0 && sequence_ranks % groups != 0)) {
    throw ConfigError("form {}: expected ring-groups that divide the {} sequence ranks, or 0, got {}", name(form),
                      sequence_ranks, groups);
  }
  if (groups > 0 && sequence_ranks / groups > n_heads) {
    throw ConfigError("form {}: expected at most {} ranks a group, since they split the {} heads, got {}", name(form),
                      n_heads, n_heads, sequence_ranks / groups);
  }
}

void validate(const ParallelSpec& spec, int64_t ranks, int64_t n_heads, int64_t n_experts) {
  if (spec.data < 1 || spec.sequence < 1 || spec.expert < 1) {
    throw ConfigError("parallel: expected data, sequence and expert of at least 1, got {}, {} and {}", spec.data,
                      spec.sequence, spec.expert);
  }
  if (spec.ranks() != ranks) {
    throw ConfigError("parallel: expected data x sequence = {} ranks, got {} x {} = {}", ranks, spec.data,
                      spec.sequence, spec.ranks());
  }
  if (spec.expert > 1 && n_experts == 0) {
    throw ConfigError("parallel: expected expert 1, since the model has no experts to split, got {}", spec.expert);
  }
  if (ranks % spec.expert != 0) {
    throw ConfigError("parallel: expected expert to divide the {} ranks, got {}", ranks, spec.expert);
  }
  if (spec.expert > 1 && n_experts < spec.expert) {
    throw ConfigError("parallel: expected at most {} expert-parallel ranks (one routed expert each), got {}", n_experts,
                      spec.expert);
  }
  validate_head_split(spec.form, spec.sequence, n_heads);
}

}  // namespace parlat
