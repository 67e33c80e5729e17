#include "cli/ranks.h"

#include <atomic>

namespace parlat {

std::vector<CommonOptions> each_rank_count(const CommonOptions& options) {
  const size_t colon = options.ranks.find(':');
  if (colon == std::string::npos) return {options};
  const std::string backend = options.ranks.substr(0, colon);
  std::vector<CommonOptions> all;
  for (const std::string& count : CLI::detail::split(options.ranks.substr(colon + 1), ',')) {
    all.push_back(options);
    all.back().ranks = backend + ":" + count;
  }
  return all;
}

int count_ranks(const CommonOptions& options) {
  std::atomic<int> ranks = 0;
  with_ranks(options, [&](Communicator& comm) { ranks = comm.size(); });
  return ranks;
}

bool is_printing_process(const CommonOptions& options) {
  if (options.ranks != "mpi") return true;
  int rank = 0;
  with_ranks(options, [&](Communicator& comm) { rank = comm.rank(); });
  return rank == 0;
}

}  // namespace parlat
