#pragma once

#include <string>
#include <vector>

namespace parlat {

// The kernels that are compiled for several instruction sets (Highway) take the best one that the machine has;
// PARLAT_ISA=NAME forces another, for tests and measurements: avx512bf16, avx512, avx2, or portable, the one that every
// machine of this architecture can run. avx512bf16 is avx512 with products of bf16 pairs, which kernels write
// themselves (Debian 12's Highway has no such target).

// Those this machine can run, best first.
std::vector<std::string> instruction_sets();
// Throws ConfigError, naming those there are, for one this machine lacks. Empty: PARLAT_ISA's, or the best.
void force_instruction_set(std::string name);
// force_instruction_set(""), once; what every kernel's entry calls first.
void apply_instruction_set();
// Whether the chosen set is avx512bf16.
bool uses_bf16_pairs();

}  // namespace parlat
