#include "parlat/kernels/instruction_sets.h"

#include <hwy/highway.h>

#include <cstdlib>

#include "parlat/base/error.h"

namespace parlat {

namespace {

std::vector<int64_t> targets() {
  std::vector<int64_t> available;
  hwy::SetSupportedTargetsForTest(0);
  // A lower bit is a better target.
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
    available.push_back(left & -left);
  }
  return available;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const int64_t target : targets()) names.emplace_back(hwy::TargetName(target));
  return names;
}

void force_instruction_set(const std::string& name) {
  std::string possible;
  for (const int64_t target : targets()) {
    if (name == hwy::TargetName(target)) {
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      return;
    }
    possible += (possible.empty() ? "" : ", ") + std::string(hwy::TargetName(target));
  }
  if (!name.empty()) throw ConfigError("PARLAT_ISA: expected one of {}, got '{}'", possible, name);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

void apply_instruction_set() {
  static const bool applied = [] {
    const char* const name = std::getenv("PARLAT_ISA");
    force_instruction_set(name == nullptr ? "" : name);
    return true;
  }();
  static_cast<void>(applied);
}

}  // namespace parlat
