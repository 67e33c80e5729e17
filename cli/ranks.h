#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/common.h"
#include "parlat/comm/communicator.h"
#include "parlat/config/model_config.h"

namespace parlat {

// Runs body(comm) on the ranks that --ranks names: threads of this process, or the processes that mpirun started.
// Throws the first error of any rank, ConfigError for a --ranks or a PARLAT_ISA that cannot be, and DataError, before
// anything runs, for a --json that cannot be written.
void with_ranks(const CommonOptions& options, const std::function<void(Communicator&)>& body);

// Runs load() in this process. Under mpirun every process runs its own and meets the others afterwards, so that a file
// that only one of them cannot read is reported.
void load_in_every_process(const CommonOptions& options, const std::function<void()>& load);

// For commands that measure at several rank counts: --ranks local:2,4,8 as one set of options a count. mpi stays one.
std::vector<CommonOptions> each_rank_count(const CommonOptions& options);

// The number of ranks that options start. Under mpirun every process calls it.
int count_ranks(const CommonOptions& options);

// Whether this process is the one that prints: always for local ranks, rank 0 under mpirun. Every process calls it.
bool is_printing_process(const CommonOptions& options);

// ConfigError, before any is made, where the weights of a model and what goes with them, at least bytes_a_parameter
// over all ranks, exceed this machine's memory: memory is promised freely and missed only once it is touched.
void require_weight_memory(const ModelConfig& config, int64_t bytes_a_parameter, const Communicator& comm);

// ConfigError for a dry run under mpirun: only ranks of one process exchange shapes.
void require_local_ranks(const CommonOptions& options);

// The dtype that a flag is given; ConfigError for one that is not among these. `flag` without its dashes.
at::ScalarType parse_dtype(const std::string& flag, const std::string& text,
                           const std::vector<at::ScalarType>& allowed = {at::kFloat, at::kBFloat16});
// --dtype of commands that compute: fp32, bf16 or fp64; several, separated by commas.
at::ScalarType parse_compute_dtype(const std::string& text);
std::vector<at::ScalarType> parse_compute_dtypes(const std::string& text);

}  // namespace parlat
