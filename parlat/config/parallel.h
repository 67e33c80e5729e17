#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace parlat {

// How attention is computed when the sequence is split over ranks. One line here, one in train/forms.cc and one cost
// function in plan/ make a new form.
enum class TrainForm { kExplicit, kAbsorbed, kLaga, kLagaQ, kRing, kHybrid };

// Which tokens a rank holds: one run of consecutive tokens, or chunks r and 2P-1-r of 2P (causal work balanced).
enum class Sharding { kContiguous, kZigzag };

// What computes attention: a kernel that writes all scores, or one that never has more than a block of them.
enum class AttentionKernel { kEager, kFused };

// What is kept of keys and values for the backward pass: the latent, from which the fused kernel rebuilds them, or all.
enum class SavedKeys { kLatent, kAll };

struct AttentionOptions {
  AttentionKernel kernel = AttentionKernel::kFused;
  SavedKeys save = SavedKeys::kLatent;
  int64_t ring_groups = 0;  // of form hybrid; 0: chosen
  // Whether laga and laga-q rebuild keys and values in the backward pass.
  bool rebuilds_keys() const { return kernel == AttentionKernel::kFused && save == SavedKeys::kLatent; }
  bool operator==(const AttentionOptions&) const = default;
};

const std::vector<TrainForm>& all_train_forms();
// Without those that gather the query latent if the model has none, and those that the kernel cannot do.
std::vector<TrainForm> possible_train_forms(bool has_query_latent, AttentionKernel kernel = AttentionKernel::kFused);
// Ring and hybrid: latents pass from rank to rank, in parts that only the fused kernel joins; more ranks than heads are
// possible.
bool passes_latents(TrainForm form);
std::string_view name(TrainForm form);
std::string_view name(Sharding sharding);
std::string_view name(AttentionKernel kernel);
std::string_view name(SavedKeys save);
// Throw ConfigError with the possible values.
TrainForm parse_train_form(std::string_view text);
Sharding parse_sharding(std::string_view text);
AttentionKernel parse_attention_kernel(std::string_view text);
SavedKeys parse_saved_keys(std::string_view text);

// data x sequence ranks; the sequence index runs fastest. Experts are split over groups of `expert` consecutive ranks
// (1: every rank holds all experts).
struct ParallelSpec {
  int64_t data = 1;
  int64_t sequence = 1;
  int64_t expert = 1;
  TrainForm form = TrainForm::kLaga;
  AttentionOptions attention = {};
  Sharding sharding = Sharding::kContiguous;
  int64_t ranks() const { return data * sequence; }
};

// The groups of consecutive ranks between which a form that passes latents does so; heads are split within a group. All
// ranks for ring. For hybrid, unless options say, the smallest groups of several ranks and no more than heads, and
// several groups; where there are none, as for a prime number of ranks, each rank by itself. Those send the fewest
// bytes: every rank's latent reaches every other once, whatever the groups, while a share 1 - 1/size of each token's
// queries and outputs changes hands within one.
int64_t ring_groups(TrainForm form, int64_t sequence_ranks, int64_t n_heads, const AttentionOptions& options);

// Throws ConfigError, saying why, where `form` splits heads over all ranks and has fewer heads than sequence ranks.
void validate_head_split(TrainForm form, int64_t sequence_ranks, int64_t n_heads);
// And where it needs a query latent that the model lacks, another kernel, or other groups.
void validate_form(TrainForm form, int64_t sequence_ranks, int64_t n_heads, bool has_query_latent,
                   const AttentionOptions& options);

// Throws ConfigError unless `ranks` ranks can run it: data * sequence == ranks, expert divides ranks and has experts
// for every rank, sequence <= n_heads for forms that split heads.
void validate(const ParallelSpec& spec, int64_t ranks, int64_t n_heads, int64_t n_experts);

}  // namespace parlat
