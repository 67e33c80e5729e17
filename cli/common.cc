#include "cli/common.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "parlat/base/error.h"
#include "parlat/base/log.h"
#include "parlat/bench/record.h"
#include "parlat/io/files.h"

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

// Known before MPI is: a wrong flag is reported by one process only.
int launched_rank() {
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}) {
    if (const char* rank = std::getenv(variable)) return std::atoi(rank);
  }
  return 0;
}

}  // namespace

void add_common_options(CLI::App& command, CommonOptions& options) {
  command.add_option("--ranks", options.ranks, "local:N (threads of this process) or mpi (under mpirun)")
      ->capture_default_str();
  command.add_option("--threads", options.threads, "threads of one rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command.add_option("--dtype", options.dtype, "fp32 or bf16")->capture_default_str();
  command.add_option("--seed", options.seed, "of weights and data order")->capture_default_str();
  command.add_option("--timeout", options.timeout_s, "seconds to wait for other ranks in one exchange")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--json", options.json, "write every figure to this file");
  command.add_flag("--quiet", options.quiet, "no progress, warnings only");
}

void with_ranks(const CommonOptions& options, const std::function<void(Communicator&)>& body) {
  set_quiet(options.quiet);
  const CommOptions comm{.timeout = std::chrono::milliseconds(static_cast<int64_t>(options.timeout_s * 1e3))};
  if (options.ranks == "mpi") return run_mpi_rank(body, options.threads, comm);
  run_local_ranks(parse_local_ranks(options.ranks), body, options.threads, comm);
}

int report_error(const std::exception& error) {
  const auto* const ours = dynamic_cast<const Error*>(&error);
  const int exit_code = ours ? ours->exit_code() : 1;
  const std::string_view text = error.what();  // torch appends a trace, of no use here, from the second line on
  // Rank 0 hears of every failure from whoever failed. Others speak up only about a peer, unless rank 0 told them.
  const int rank = launched_rank();
  const bool about_peer = dynamic_cast<const CommError*>(&error) && text.find("rank 0 failed: ") == text.npos;
  if (rank != 0 && !about_peer) return exit_code;
  fmt::print(stderr, "parlat: error: {}{}\n", rank == 0 ? "" : fmt::format("rank {}: ", rank),
             text.substr(0, text.find('\n')));
  return exit_code;
}

void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += i == 0 ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    fmt::print("{}\n", line);
  }
  std::fflush(stdout);
}

void write_record(const CommonOptions& options, const std::string& command, const nlohmann::json& config,
                  const nlohmann::json& rows) {
  if (options.json.empty()) return;
  write_file_atomically(options.json, make_record(command, config, rows).dump(2) + "\n");
}

}  // namespace parlat
