#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace parlat {

// What plans of training and decoding share: --machine, --ranks, --nodes and --dtype.
void add_plan_machine(CLI::App& command, std::string& machine, int64_t& ranks, int64_t& nodes, std::string& dtype);

}  // namespace parlat
