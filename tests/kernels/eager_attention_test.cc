// What attention with materialised probabilities keeps.
#include "parlat/kernels/eager_attention.h"

#include "parlat/tensor/memory_meter.h"
#include "tests/kernels/attention_case.h"
#include "tests/thread_count.h"

namespace parlat {
namespace {

using Case = AttentionCase;

class Eager : public ::testing::TestWithParam<at::ScalarType> {};

// Between forward and backward: the output and the probabilities, nothing else. In the backward pass: gradients, and
// scratch of one head.
TEST_P(Eager, KeepsTheProbabilitiesOnly) {
  constexpr int64_t kTokens = 300, kHeads = 6, kColumns = 12, kValues = 8;
  const int64_t element = c10::elementSize(GetParam()),
                wide = c10::elementSize(GetParam() == at::kDouble ? at::kDouble : at::kFloat);
  const ThreadCount one(1);  // scratch is a thread's
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Case c = random_case(causal(1, kTokens), kHeads, kHeads, GetParam(), kColumns, kValues);
  meter.reset();
  const Tensor out = eager_attention(c.q, c.k, c.v, c.visible, kScale);
  EXPECT_EQ(meter.current_bytes(), (kHeads * kTokens * kTokens + kTokens * kHeads * kValues) * element);

  const int64_t before = meter.current_bytes();
  const auto grads = torch::autograd::grad({out}, c.inputs(), {c.grad}, /*retain_graph=*/true);
  const int64_t gradients = kTokens * kHeads * (2 * kColumns + kValues) * element;
  const int64_t scratch = 2 * kTokens * (kColumns + kValues) + 256 * (2 * kTokens + 2 * kColumns + kValues);
  constexpr int64_t kAlignment = 64 * 16;
  EXPECT_LE(meter.peak_bytes() - before, gradients + scratch * wide + kAlignment);
}

// Two heads on two threads need scratch of both at some moment, sooner or later.
TEST_P(Eager, TheMeterSeesEveryThread) {
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Case c = random_case(causal(1, 1000), 2, 2, GetParam());
  const at::NoGradGuard no_grad;
  const auto peak = [&](int threads) {
    const ThreadCount count(threads);
    meter.reset();
    eager_attention(c.q, c.k, c.v, c.visible, kScale);
    return meter.peak_bytes();
  };
  const int64_t of_one = peak(1);
  int64_t of_two = 0;
  for (int i = 0; i < 100 && of_two <= of_one; ++i) of_two = peak(2);
  EXPECT_GT(of_two, of_one);
}

TEST_P(Eager, WithoutAutogradNoProbabilitiesExist) {
  MemoryMeter meter;
  const MemoryMeter::Scope scope(meter);
  const Case c = random_case(causal(1, 1000), 4, 4, GetParam());
  const Tensor want = run(eager_attention, c).out;
  meter.reset();
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(eager_attention(c.q, c.k, c.v, c.visible, kScale).equal(want));
  EXPECT_LE(meter.peak_bytes(), 4 * 1000 * 1000 * static_cast<int64_t>(c10::elementSize(GetParam())) / 2);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Eager, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace parlat
