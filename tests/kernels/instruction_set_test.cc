// A set that PARLAT_ISA names and this machine lacks ends the run before its first test.
#include <gtest/gtest.h>

#include "parlat/kernels/instruction_sets.h"

namespace parlat {
namespace {

class ChosenSet final : public ::testing::Environment {
  void SetUp() override { apply_instruction_set(); }
};

// As gtest registers tests. NOLINTNEXTLINE(bugprone-throwing-static-initialization)
const ::testing::Environment* const kChosenSet = ::testing::AddGlobalTestEnvironment(new ChosenSet);

}  // namespace
}  // namespace parlat
