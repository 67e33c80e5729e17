#include "cli/common.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "parlat/base/error.h"
#include "parlat/base/log.h"
#include "parlat/base/printable.h"
#include "parlat/bench/record.h"
#include "parlat/io/files.h"
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

// Less is no wait at all; more does not fit into the nanoseconds of a clock. NaN is neither.
std::string check_timeout(const std::string& text) {
  const double seconds = std::strtod(text.c_str(), nullptr);
  if (1e-3 <= seconds && seconds <= 1e9) return "";
  return fmt::format("expected 0.001 to 1e9 seconds, got {}", text);
}

// Known before MPI is: a wrong flag is reported by one process only.
int launched_rank() {
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}) {
    if (const char* rank = std::getenv(variable)) return std::atoi(rank);
  }
  return 0;
}

}  // namespace

void require_writable(const std::filesystem::path& file) {
  if (file.empty()) return;
  std::error_code ignored;
  const bool there = std::filesystem::exists(file, ignored);
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  errno = EISDIR;
  if (std::filesystem::is_directory(file, ignored) || ::access((there ? file : folder).c_str(), W_OK) != 0) {
    throw DataError("{}: cannot be written: {}", file.string(), std::strerror(errno));
  }
}

void add_common_options(CLI::App& command, CommonOptions& options) {
  command.add_option("--ranks", options.ranks, "local:N (threads of this process) or mpi (under mpirun)")
      ->capture_default_str();
  command.add_option("--threads", options.threads, "threads of one rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command.add_option("--dtype", options.dtype, "fp32 or bf16")->capture_default_str();
  command.add_option("--seed", options.seed, "of weights and data order")->capture_default_str();
  command.add_option("--timeout", options.timeout_s, "seconds to wait for other ranks in one exchange")
      ->check(check_timeout)
      ->capture_default_str();
  command.add_option("--json", options.json, "write every figure to this file");
  command.add_flag("--quiet", options.quiet, "no progress, warnings only");
}

void with_ranks(const CommonOptions& options, const std::function<void(Communicator&)>& body) {
  set_quiet(options.quiet);
  if (launched_rank() == 0) require_writable(options.json);
  const CommOptions comm{.timeout = std::chrono::milliseconds(static_cast<int64_t>(options.timeout_s * 1e3))};
  if (options.ranks == "mpi") return run_mpi_rank(body, options.threads, comm);
  run_local_ranks(parse_local_ranks(options.ranks), body, options.threads, comm);
}

void load_in_every_process(const CommonOptions& options, const std::function<void()>& load) {
  if (options.ranks != "mpi") return load();
  with_ranks(options, [&](Communicator& comm) {
    load();
    comm.barrier("loading");
  });
}

at::ScalarType parse_compute_dtype(const std::string& text) {
  const at::ScalarType dtype = parse_dtype(text);
  if (dtype == at::kHalf) throw ConfigError("dtype: expected fp32, bf16 or fp64, got {}", text);
  return dtype;
}

std::vector<at::ScalarType> parse_compute_dtypes(const std::string& text) {
  std::vector<at::ScalarType> dtypes;
  for (const std::string& dtype : CLI::detail::split(text, ',')) dtypes.push_back(parse_compute_dtype(dtype));
  return dtypes;
}

void add_inner_norm_eps(CLI::App& command, double& eps) {
  command.add_option("--inner-norm-eps", eps, "of q_norm and kv_norm, whatever rms_norm_eps says")
      ->capture_default_str();
}

ModelConfig load_model_config(const std::string& path_or_name, double inner_norm_eps) {
  if (!(inner_norm_eps > 0 && inner_norm_eps < 1)) {
    throw ConfigError("inner-norm-eps: expected a number above 0 and below 1, got {}", inner_norm_eps);
  }
  ModelConfig config = load_model_config(path_or_name);
  config.mla.inner_norm_eps = inner_norm_eps;
  return config;
}

int report_error(const std::exception& error) {
  const auto* const ours = dynamic_cast<const Error*>(&error);
  const int exit_code = ours ? ours->exit_code() : 1;
  std::string text = error.what();
  if (!ours) text = text.substr(0, text.find('\n'));  // torch appends a trace, of no use here
  // Rank 0 hears of every failure from whoever failed. Others speak up only about a peer, unless rank 0 told them.
  const int rank = launched_rank();
  const bool about_peer = dynamic_cast<const CommError*>(&error) && text.find("rank 0 failed: ") == text.npos;
  if (rank != 0 && !about_peer) return exit_code;
  fmt::print(stderr, "parlat: error: {}{}\n", rank == 0 ? "" : fmt::format("rank {}: ", rank), printable(text));
  return exit_code;
}

void print_table(std::vector<std::vector<std::string>> rows) {
  std::vector<size_t> widths;
  for (auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = printable(row[i]);
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      text += i == 0 ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    text += '\n';
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
  flush_stdout();
}

void flush_stdout() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    throw DataError("stdout: cannot be written: {}", std::strerror(errno));
  }
}

void write_record(const CommonOptions& options, const std::string& command, const nlohmann::json& config,
                  const nlohmann::json& rows) {
  if (options.json.empty()) return;
  write_file_atomically(
      options.json,
      make_record(command, config, rows).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace parlat
