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
// Throws the first error of any rank, and ConfigError for a --ranks that cannot be.
void with_ranks(const CommonOptions& options, const std::function<void(Communicator&)>& body);

// Prints "parlat: error: ..." on stderr, once over all ranks unless it is about a peer, and returns the exit code.
int report_error(const std::exception& error);

// On stdout, columns padded to their widest cell; the first row is the header. The first column is set to the left,
// the others to the right.
void print_table(const std::vector<std::vector<std::string>>& rows);

// The record of a run (parlat/bench/record.h) into the file that --json names; without --json nothing.
void write_record(const CommonOptions& options, const std::string& command, const nlohmann::json& config,
                  const nlohmann::json& rows);

}  // namespace parlat
