// A set that PARLAT_ISA names and this machine lacks ends the run before its first test.
#include <gtest/gtest.h>

#include "parlat/kernels/instruction_sets.h"

namespace parlat {
namespace {

class ChosenSet final : public ::testing::Environment {
  void SetUp() override { apply_instruction_set(); }
};

const ::testing::Environment* const kChosenSet = []() noexcept {
  return ::testing::AddGlobalTestEnvironment(new ChosenSet);
}();

}  // namespace
}  // namespace parlat
