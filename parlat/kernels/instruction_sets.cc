#include "parlat/kernels/instruction_sets.h"

#include <fmt/ranges.h>
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "parlat/base/error.h"

namespace parlat {

namespace {

constexpr int64_t kAvx512 = HWY_AVX3_DL | HWY_AVX3;
#ifdef HWY_AVX3_SPR
constexpr int64_t kNewerThanAvx512 = HWY_AVX3_ZEN4 | HWY_AVX3_SPR;
#else
constexpr int64_t kNewerThanAvx512 = 0;
#endif

constexpr const char* kBf16Pairs = "avx512bf16";

bool has_bf16_pairs() {
#if defined(__x86_64__) && !defined(__clang__)
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

struct InstructionSet {
  std::string name;
  int64_t targets;  // Highway's, of which it takes the best
};

std::atomic<bool> forced_once = false, bf16_pairs = false;
// The targets that Highway may choose from; 0: all that the machine has.
int64_t allowed_targets = 0;

void allow(int64_t targets) {
  allowed_targets = targets;
  hwy::SetSupportedTargetsForTest(targets);
}

// Those this machine can run.
std::vector<InstructionSet> available_sets() {
  hwy::SetSupportedTargetsForTest(0);
  const int64_t available = hwy::SupportedTargets() & HWY_TARGETS;
  hwy::SetSupportedTargetsForTest(allowed_targets);
  int64_t lowest = available;  // a lower bit is a better target
  while ((lowest & (lowest - 1)) != 0) lowest &= lowest - 1;
  std::vector<InstructionSet> sets;
  for (const auto& [name, targets] : {InstructionSet{kBf16Pairs, has_bf16_pairs() ? kAvx512 | kNewerThanAvx512 : 0},
                                      {"avx512", kAvx512},
                                      {"avx2", HWY_AVX2},
                                      {"portable", lowest}}) {
    if ((targets & available) != 0) sets.push_back({name, targets & available});
  }
  return sets;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : available_sets()) names.push_back(set.name);
  return names;
}

void force_instruction_set(std::string name) {
  if (const char* const wanted = std::getenv("PARLAT_ISA"); name.empty() && wanted != nullptr) name = wanted;
  const std::vector<InstructionSet> sets = available_sets();
  const auto forced = std::find_if(sets.begin(), sets.end(), [&](const auto& set) { return set.name == name; });
  if (forced == sets.end() && !name.empty()) {
    throw ConfigError("PARLAT_ISA: expected one of {}, got '{}'", fmt::join(instruction_sets(), ", "), name);
  }
  allow(forced != sets.end() ? forced->targets : 0);
  bf16_pairs = (forced != sets.end() ? *forced : sets.front()).name == kBf16Pairs;
  forced_once = true;
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

bool uses_bf16_pairs() {
  apply_instruction_set();
  return bf16_pairs;
}

void apply_instruction_set() {
  static const bool applied = [] {
    if (!forced_once) force_instruction_set("");
    return true;
  }();
  static_cast<void>(applied);
}

}  // namespace parlat
