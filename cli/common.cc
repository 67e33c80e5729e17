#include "cli/common.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>

#include "cli/record.h"
#include "parlat/base/error.h"
#include "parlat/base/printable.h"
#include "parlat/io/atomic_file.h"
#include "parlat/io/files.h"

namespace parlat {

namespace {

// What write_record's files begin with: names are sorted.
constexpr std::string_view kRecordStart = "{\n  \"command\": ";

// Less is no wait at all; more does not fit into the nanoseconds of a clock. NaN is neither.
std::string check_timeout(const std::string& text) {
  const double seconds = std::strtod(text.c_str(), nullptr);
  if (1e-3 <= seconds && seconds <= 1e9) return "";
  return fmt::format("expected 0.001 to 1e9 seconds, got {}", text);
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

void require_record_file(const std::filesystem::path& file) {
  require_writable(file);
  std::error_code missing;
  const auto bytes = std::filesystem::file_size(file, missing);
  if (missing || bytes == 0 || is_written_straight(file)) return;
  std::string start(kRecordStart.size(), '\0');
  std::ifstream(file).read(start.data(), static_cast<std::streamsize>(start.size()));
  if (start != kRecordStart) {
    throw DataError("{}: expected a new file, or a record to replace, for --json, got another file", file.string());
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

CLI::Option* add_size_option(CLI::App& command, const std::string& flag, int64_t& bytes, const std::string& help) {
  const auto to_bytes = [](std::string& text) {
    const std::string given = text;
    const CLI::AsSizeValue parse(/*kb_is_1000=*/true);
    uint64_t count = 0;
    try {  // to CLI11 -1 is a large size, and GB alone is 1GB
      if (!given.empty() && std::isdigit(given.front()) != 0 && parse(text).empty())
        CLI::detail::lexical_cast(text, count);
    } catch (const CLI::ValidationError&) {  // said below
    }
    if (1 <= count && count <= uint64_t{1} << 60) return std::string();
    return fmt::format("expected a whole number of bytes from 1 to 2^60, as in 80GB, got '{}'", given);
  };
  return command.add_option(flag, bytes, help)
      ->type_name("SIZE [b, kb(=1000b), kib(=1024b), ...]")  // program.cc holds what CLI11 calls INT to digits
      ->transform(CLI::Validator(to_bytes, ""));
}

std::vector<std::string> split_list(const std::string& flag, const std::string& text) {
  std::vector<std::string> elements = CLI::detail::split(text + ",", ',');  // which passes over an empty last one
  if (std::find(elements.begin(), elements.end(), "") == elements.end()) return elements;
  throw ConfigError("{}: expected values with one comma between them, got '{}'", flag, text);
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

int launched_rank() {
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}) {
    if (const char* rank = std::getenv(variable)) return std::atoi(rank);
  }
  return 0;
}

int report_error(const std::exception& error, bool one_of_several) {
  const auto* const ours = dynamic_cast<const Error*>(&error);
  const int exit_code = ours ? ours->exit_code() : 1;
  std::string text = error.what();
  if (!ours) text = text.substr(0, text.find('\n'));  // torch appends a trace, of no use here
  // Rank 0 hears of every failure from whoever failed. Others speak up only about a peer, unless rank 0 told them.
  const int rank = one_of_several ? launched_rank() : 0;
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
