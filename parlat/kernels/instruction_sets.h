#pragma once

#include <string>
#include <vector>

namespace parlat {

// The kernels that are compiled for several instruction sets (Highway) take the best one that the machine has;
// PARLAT_ISA=NAME forces another, for tests and measurements.

// Those this machine can run, best first: "AVX3", "AVX2", "SSE4", "SSSE3", ...
std::vector<std::string> instruction_sets();
// Throws ConfigError, naming those there are, for one this machine lacks. Empty: the best.
void force_instruction_set(const std::string& name);
// Applies PARLAT_ISA, once; what every kernel's entry calls first.
void apply_instruction_set();

}  // namespace parlat
