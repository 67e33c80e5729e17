#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace parlat {

// What plans of training and decoding share: --machine, --ranks, --nodes and --dtype; --memory.
void add_plan_machine(CLI::App& command, std::string& machine, int64_t& ranks, int64_t& nodes, std::string& dtype);
void add_plan_memory(CLI::App& command, int64_t& memory, const std::string& help);

}  // namespace parlat
