#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parlat/comm/communicator.h"
#include "parlat/config/model_config.h"

namespace parlat {

// The flags every subcommand shares.
struct CommonOptions {
  std::string ranks = "local:1";  // local:N or mpi
  int threads = 1;                // intra-op threads of one rank
  std::string dtype = "fp32";
  uint64_t seed = 1;
  double timeout_s = 60;       // of one exchange
  std::filesystem::path json;  // where every figure is written; empty: nowhere
  bool quiet = false;
};
void add_common_options(CLI::App& command, CommonOptions& options);

// Runs body(comm) on the ranks that --ranks names: threads of this process, or the processes that mpirun started.
// Throws the first error of any rank, ConfigError for a --ranks that cannot be, and DataError, before anything runs,
// for a --json that cannot be written.
void with_ranks(const CommonOptions& options, const std::function<void(Communicator&)>& body);

// Runs load() in this process. Under mpirun every process runs its own and meets the others afterwards, so that a file
// that only one of them cannot read is reported.
void load_in_every_process(const CommonOptions& options, const std::function<void()>& load);

// --dtype of commands that compute, one of fp32, bf16 and fp64. ConfigError for others.
at::ScalarType parse_compute_dtype(const std::string& text);
// Several, separated by commas.
std::vector<at::ScalarType> parse_compute_dtypes(const std::string& text);

// --inner-norm-eps of commands that take a model: what q_norm and kv_norm add to the mean square.
void add_inner_norm_eps(CLI::App& command, double& eps);
// load_model_config with that eps. ConfigError unless it lies between 0 and 1.
ModelConfig load_model_config(const std::string& path_or_name, double inner_norm_eps);

// Prints "parlat: error: ..." on stderr, once over all ranks unless it is about a peer, and returns the exit code.
int report_error(const std::exception& error);

// On stdout, columns padded to their widest cell; the first row is the header. The first column is set to the left,
// the others to the right. DataError where stdout cannot be written.
void print_table(std::vector<std::vector<std::string>> rows);

// DataError where what was printed could not be written (a full disk).
void flush_stdout();

// DataError, before anything is measured or printed, where a --json cannot be written; nothing for an empty path.
void require_writable(const std::filesystem::path& file);
// The record of a run (parlat/bench/record.h) into the file that --json names; without --json nothing.
void write_record(const CommonOptions& options, const std::string& command, const nlohmann::json& config,
                  const nlohmann::json& rows);

}  // namespace parlat
