#include "cli/ranks.h"

#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "parlat/base/error.h"
#include "parlat/base/log.h"
#include "parlat/base/memory_limit.h"
#include "parlat/base/units.h"
#include "parlat/decode/cache_size.h"
#include "parlat/kernels/instruction_sets.h"
#include "parlat/plan/flops.h"
#include "parlat/tensor/shape.h"

namespace parlat {

namespace {

constexpr std::string_view kLocal = "local:";

int parse_local_ranks(const std::string& text) {
  int ranks = 0;
  const char* const end = text.data() + text.size();
  if (!text.starts_with(kLocal)) throw ConfigError("ranks: expected local:N or mpi, got '{}'", text);
  const auto [stop, error] = std::from_chars(text.data() + kLocal.size(), end, ranks);
  if (error != std::errc() || stop != end || ranks < 1 || ranks > 1024) {
    throw ConfigError("ranks: expected local:N with N from 1 to 1024, or mpi, got '{}'", text);
  }
  return ranks;
}

// Once a process, by the first of them.
void warn_of_unused_mpirun() {
  const char* const processes = std::getenv("OMPI_COMM_WORLD_SIZE");
  if (processes == nullptr || std::atoi(processes) < 2 || launched_rank() != 0) return;
  static std::once_flag warned;
  std::call_once(warned, [&] {
    log_warning(fmt::format("mpirun started {} processes, each of which does all by itself: --ranks mpi joins them",
                            processes));
  });
}

}  // namespace

void with_ranks(const CommonOptions& options, const std::function<void(Communicator&)>& body) {
  apply_instruction_set();
  set_quiet(options.quiet);
  const bool mpi = options.ranks == "mpi";
  if (!mpi || launched_rank() == 0) require_record_file(options.json);
  if (!mpi) warn_of_unused_mpirun();
  const CommOptions comm{.timeout = std::chrono::milliseconds(static_cast<int64_t>(options.timeout_s * 1e3))};
  if (mpi) return run_mpi_rank(body, options.threads, comm);
  run_local_ranks(parse_local_ranks(options.ranks), body, options.threads, comm);
}

void load_in_every_process(const CommonOptions& options, const std::function<void()>& load) {
  if (options.ranks != "mpi") return load();
  with_ranks(options, [&](Communicator& comm) {
    load();
    comm.barrier("loading");
  });
}

std::vector<CommonOptions> each_rank_count(const CommonOptions& options) {
  const size_t colon = options.ranks.find(':');
  if (colon == std::string::npos) return {options};
  const std::string backend = options.ranks.substr(0, colon);
  std::vector<CommonOptions> all;
  for (const std::string& count : split_list("ranks", options.ranks.substr(colon + 1))) {
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

void require_weight_memory(const ModelConfig& config, int64_t bytes_a_parameter, const Communicator& comm) {
  const int64_t parameters = count_parameters(config).total;
  const auto memory = static_cast<double>(memory_limit());
  const double wanted =
      static_cast<double>(parameters) * static_cast<double>(bytes_a_parameter) * ranks_here(comm) / comm.size();
  if (wanted <= memory) return;
  throw ConfigError("weights: expected at most this machine's memory of {}, got {} for {} parameters",
                    format_bytes(memory), format_bytes(wanted), format_count(parameters));
}

void require_local_ranks(const CommonOptions& options) {
  if (options.ranks != "mpi") return;
  throw ConfigError("dry-run: expected --ranks local:N, threads that exchange shapes, got mpi");
}

at::ScalarType parse_dtype(const std::string& flag, const std::string& text,
                           const std::vector<at::ScalarType>& allowed) {
  std::string names;
  for (const at::ScalarType dtype : allowed) {
    if (name(dtype) == text) return dtype;
    names += (names.empty() ? "" : dtype == allowed.back() ? " or " : ", ") + std::string(name(dtype));
  }
  throw ConfigError("{}: expected {}, got '{}'", flag, names, text);
}

at::ScalarType parse_compute_dtype(const std::string& text) {
  return parse_dtype("dtype", text, {at::kFloat, at::kBFloat16, at::kDouble});
}

std::vector<at::ScalarType> parse_compute_dtypes(const std::string& text) {
  std::vector<at::ScalarType> dtypes;
  for (const std::string& dtype : split_list("dtype", text)) dtypes.push_back(parse_compute_dtype(dtype));
  return dtypes;
}

}  // namespace parlat
