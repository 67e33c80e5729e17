#pragma once

#include <vector>

#include "cli/common.h"

namespace parlat {

// For commands that measure at several rank counts: --ranks local:2,4,8 as one set of options a count. mpi stays one.
std::vector<CommonOptions> each_rank_count(const CommonOptions& options);

// The number of ranks that options start. Under mpirun every process calls it.
int count_ranks(const CommonOptions& options);

// Whether this process is the one that prints: always for local ranks, rank 0 under mpirun. Every process calls it.
bool is_printing_process(const CommonOptions& options);

}  // namespace parlat
