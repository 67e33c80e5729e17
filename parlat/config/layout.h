#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "parlat/base/range.h"

namespace parlat {

struct MlaDims;

// How the latent cache lies over ranks while decoding (docs/mathematics.md sections 6 and 8). One line here and in
// layout.cc, and what each rank holds in place(), make a new layout.
//   mla        every rank the whole latent, its own heads
//   gla        every rank one slice of the latent, its own heads: they see that slice only (slices are dealt the heads,
//              ranks that share one split its heads)
//   tpla       every rank one slice of the latent, all heads (ranks that share a slice split them)
//   dcp        every rank the whole latent of every P-th token, all heads
//   tpla-dcp   ranks in groups: one slice a group, its tokens split over the group's ranks
enum class DecodeLayout { kMla, kGla, kTpla, kDcp, kTplaDcp };

const std::vector<DecodeLayout>& all_decode_layouts();
std::string_view name(DecodeLayout layout);
// Throws ConfigError with the possible values.
DecodeLayout parse_decode_layout(std::string_view text);

// Whether a rank keeps a slice of the latent rather than all of it.
bool is_sliced(DecodeLayout layout);

struct LayoutSpec {
  DecodeLayout layout = DecodeLayout::kMla;
  int64_t groups = 1;  // slices of the latent: 1 for mla and dcp
};

// What one rank holds and computes.
struct Placement {
  int64_t groups = 1, group = 0;    // slices, and which is this rank's
  int64_t members = 1, member = 0;  // the ranks that share the slice
  bool tokens_split = false;        // among them: token t lies on member t % members; otherwise they split heads
  Range heads;                      // whose queries, maps and output columns this rank has
  Range prefill_heads;              // the part of them that it computes in an exact prefill
  // Whether a token lies on this rank, and as which of those that do.
  bool holds(int64_t position) const { return !tokens_split || position % members == member; }
  int64_t local_index(int64_t position) const { return tokens_split ? position / members : position; }
  // Tokens of [0, length) that lie on this rank, and on the member that has most of them.
  int64_t local_count(int64_t length) const {
    return tokens_split ? (length - member + members - 1) / members : length;
  }
  int64_t most_count(int64_t length) const { return (length + token_sharers() - 1) / token_sharers(); }
  // Ranks that a sequence's tokens of one slice are dealt out to.
  int64_t token_sharers() const { return tokens_split ? members : 1; }
};

// Whether place has nothing against it.
bool can_place(const LayoutSpec& spec, const MlaDims& dims, int ranks);

// Throws ConfigError, saying why, where the layout cannot be: groups must divide the ranks and be no more than columns
// of the latent, every rank needs a head.
Placement place(const LayoutSpec& spec, const MlaDims& dims, int ranks, int rank);

// Elements of the cache that a token takes on the rank with the widest slice, a layer: (L/G + R) / members that split
// tokens. For slices of equal width, as even as L and G allow. Throws what place throws.
double cache_elements_per_token(const MlaDims& dims, const LayoutSpec& layout, int ranks);

}  // namespace parlat
