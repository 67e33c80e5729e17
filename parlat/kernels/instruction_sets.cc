#include "parlat/kernels/instruction_sets.h"

#include <fmt/ranges.h>
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "parlat/base/error.h"

namespace parlat {

namespace {

#ifdef HWY_AVX3_SPR
constexpr int64_t kAvx512Bf16 = HWY_AVX3_ZEN4 | HWY_AVX3_SPR;
#else
constexpr int64_t kAvx512Bf16 = 0;
#endif

struct InstructionSet {
  std::string name;
  int64_t targets;  // Highway's, of which it takes the best
};

std::atomic<bool> forced_once = false;
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
  for (const auto& [name, targets] : {InstructionSet{"avx512bf16", kAvx512Bf16},
                                      {"avx512", HWY_AVX3_DL | HWY_AVX3},
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
  forced_once = true;
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

void apply_instruction_set() {
  static const bool applied = [] {
    if (!forced_once) force_instruction_set("");
    return true;
  }();
  static_cast<void>(applied);
}

}  // namespace parlat
