#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parlat/config/model_config.h"

namespace parlat {

// What every subcommand shares, without torch; cli/ranks.h has what those that compute share.
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

// A flag for bytes that are given as 80GB, 64MiB or 1000: a whole number from 1 to 2^60.
CLI::Option* add_size_option(CLI::App& command, const std::string& flag, int64_t& bytes, const std::string& help);

// A flag for values that are given as a,b,c, which run_program holds to split_list. CLI11 would write the default as
// whatever operator<< for vectors it sees does.
template <typename Value>
CLI::Option* add_list_option(CLI::App& command, const std::string& flag, std::vector<Value>& values,
                             const std::string& help) {
  CLI::Option* const option = command.add_option(flag, values, help)->delimiter(',');
  return values.empty() ? option : option->default_str(fmt::format("{}", fmt::join(values, ",")));
}

// The elements of "a,b,c". ConfigError, which names the flag, where one is empty.
std::vector<std::string> split_list(const std::string& flag, const std::string& text);

// --inner-norm-eps of commands that take a model: what q_norm and kv_norm add to the mean square.
void add_inner_norm_eps(CLI::App& command, double& eps);
// load_model_config with that eps. ConfigError unless it lies between 0 and 1.
ModelConfig load_model_config(const std::string& path_or_name, double inner_norm_eps);

// Known before MPI is, 0 without mpirun: a wrong flag is reported by one process only.
int launched_rank();

// Prints "parlat: error: ..." on stderr and returns the exit code. One rank of several (--ranks mpi) is silent about
// what rank 0 reports; launchers number processes that know nothing of each other, too.
int report_error(const std::exception& error, bool one_of_several = false);

// On stdout, columns padded to their widest cell; the first row is the header. The first column is set to the left,
// the others to the right. DataError where stdout cannot be written.
void print_table(std::vector<std::vector<std::string>> rows);

// DataError where what was printed could not be written (a full disk).
void flush_stdout();

// DataError, before anything is measured or printed, where a file cannot be written; nothing for an empty path.
void require_writable(const std::filesystem::path& file);
// The same for --json, and where the file is there and no record: a text or a config given by mistake is not lost.
void require_record_file(const std::filesystem::path& file);
// The record of a run (cli/record.h) into the file that --json names; without --json nothing.
void write_record(const CommonOptions& options, const std::string& command, const nlohmann::json& config,
                  const nlohmann::json& rows);

}  // namespace parlat
