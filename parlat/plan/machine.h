#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace parlat {

// A rate by the size of the work: linear in the logarithm of the size between points, constant beyond the outermost.
struct RateCurve {
  std::vector<double> sizes;  // growing
  std::vector<double> rates;
  double at(double size) const;
};

// What one rank sends to others, all ranks sending at once.
struct Link {
  double latency_s = 0;
  double bytes_per_s = 0;
  std::optional<double> decode_latency_s = {};  // of the few bytes of a decode step; absent: latency_s
};

// FLOP/s of one kernel over the visible pairs of queries and keys: forward 2 (d_qk + d_v) a pair and head, backward
// 2 (3 d_qk + 2 d_v) where the kernel computes scores again and 4 (d_qk + d_v) where it has kept them.
struct KernelRate {
  double forward = 0;
  double backward = 0;
};

struct AttentionRates {
  KernelRate fused;
  std::optional<KernelRate> eager;  // absent: as what writes its scores, below
  // Heads wider than this have no fused kernel. They run as products over all S x S scores at the rate of products, the
  // scores passing through memory (form_time.h).
  std::optional<int64_t> widest_fused;
  double written_share = 1;  // of the rates of products and memory, what attention that writes its scores reaches
  std::optional<double> decode_rate;  // FLOP/s over a latent cache; absent: that of fused, forward
};

// What one rank of a machine, or of a cluster of equal nodes, computes and sends. Read from TOML; every key is in
// docs/plan.md.
struct Machine {
  std::string name;  // where it came from
  int64_t ranks_per_node = 1;
  int64_t ranks_at_full_rate = 1;    // more ranks on a node share the rates of so many
  double memory_bytes = 0;           // of a rank
  double memory_bytes_per_s = 0;     // of a rank: read and written
  double overlap = 0;                // share of an exchange that hides behind simultaneous computation, 0 to 1
  double layer_overhead_s = 0;       // fixed time of one layer's forward pass; backward twice that
  bool hierarchical_gather = false;  // one copy of a shard crosses to each other node, rather than one for each rank
  Link within;
  std::optional<Link> between;
  std::map<std::string, RateCurve> gemm;            // by dtype: FLOP/s by the smallest of a product's three dimensions
  std::map<std::string, AttentionRates> attention;  // by dtype

  // ConfigError naming the key where the description lacks what a plan in `dtype` needs.
  const RateCurve& gemm_in(const std::string& dtype) const;
  const AttentionRates& attention_in(const std::string& dtype) const;
  const Link& between_nodes() const;
};

// A file, or the name of one of machines/ (with or without .toml). Throws DataError for what cannot be read or is no
// TOML, ConfigError with file and key for a key that is unknown, missing, or no number in its range.
Machine load_machine(const std::string& path_or_name);
// The same from text; `name` is what errors call it.
Machine parse_machine(const std::string& toml, const std::string& name);

std::vector<std::string> shipped_machine_names();

// The text that parse_machine reads as `machine`.
std::string to_toml(const Machine& machine);

// Throws ConfigError unless the machine has room for so many ranks, an equal number on each node, and links between
// them.
void check_ranks(const Machine& machine, int64_t ranks, int64_t nodes);

// Bytes of one element: bf16 2, fp32 4, fp64 8. ConfigError for others, `where` being what names them.
int64_t dtype_bytes(const std::string& dtype, const std::string& where = "dtype");

}  // namespace parlat
