// What the attention kernels refuse, each in one line that says what was expected and what was given.
#include "parlat/kernels/attention_inputs.h"

#include <gmock/gmock.h>

#include <functional>

#include "parlat/base/error.h"
#include "parlat/kernels/eager_attention.h"
#include "parlat/kernels/fused_attention.h"
#include "tests/kernels/attention_case.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

struct Refused {
  Tensor first, second, third;
  std::string error;
};

template <typename Kernel>
void expect_refused(const Kernel& kernel, const Refused& c) {
  try {
    kernel(c.first, c.second, c.third, causal(2, 9), kScale);
    FAIL() << "accepted, not: " << c.error;
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.what(), c.error);
  }
}

TEST(AttentionInputs, OfOtherShapesAndDtypesAreRefused) {
  const Tensor q = at::ones({2, 9, 3, 12}), v = at::ones({2, 9, 3, 8});
  const Refused all[] = {
      {q, q.narrow(2, 0, 2), v, "k: expected shape [2, 9, 3, 12], got [2, 9, 2, 12]"},
      {q[0][0], q, v, "q: expected shape [2, 9, *, *], got [3, 12]"},
      {q, q[0][0], v, "k: expected shape [2, 9, 3, 12], got [3, 12]"},
      {q, q, v[0], "v: expected shape [2, 9, 3, *], got [9, 3, 8]"},
      {q, q, v.narrow(1, 0, 8), "v: expected shape [2, 9, 3, *], got [2, 8, 3, 8]"},
      {q, q.to(at::kBFloat16), v, "k: expected fp32 as q, got bf16"},
      {q, q, v.to(at::kDouble), "v: expected fp32 as q, got fp64"},
      {q.to(at::kHalf), q.to(at::kHalf), v.to(at::kHalf), "q: expected bf16, fp32 or fp64, got fp16"},
      {q.to(at::kLong), q.to(at::kLong), v.to(at::kLong), "q: expected bf16, fp32 or fp64, got Long"},
  };
  for (const Refused& c : all) {
    expect_refused(eager_attention, c);
    expect_refused(fused_attention, c);
  }
}

TEST(LatentInputs, OfOtherShapesAndDtypesAreRefused) {
  const Tensor q = at::ones({2, 9, 3, 8 + 4}), latent = at::ones({2, 9, 10 + 4}), w = at::ones({3 * (8 + 8), 10});
  const std::string widths =
      "fused latent attention: expected w_ukv [H (N+V), L] of q [B, S, H, N+R] and latent [B, T, L+R], got ";
  const Refused all[] = {
      {q[0][0], latent, w, "q: expected shape [2, 9, *, *], got [3, 12]"},
      {q, latent.narrow(1, 0, 8), w, "latent: expected shape [2, 9, *], got [2, 8, 14]"},
      {q, latent[0][0], w, "latent: expected shape [2, 9, *], got [14]"},
      {q, latent, w[0], "w_ukv: expected shape [*, *], got [10]"},
      {q, latent, w.narrow(0, 0, 47), widths + "[47, 10], [2, 9, 3, 12] and [2, 9, 14]"},
      {q, latent.narrow(2, 0, 9), w, widths + "[48, 10], [2, 9, 3, 12] and [2, 9, 9]"},
      {q, latent.to(at::kBFloat16), w, "latent: expected fp32 as q, got bf16"},
      {q, latent, w.to(at::kBFloat16).requires_grad_(), "w_ukv: expected fp32 as q, got bf16"},
      {q.to(at::kHalf), latent.to(at::kHalf), w.to(at::kHalf), "q: expected bf16, fp32 or fp64, got fp16"},
      {q.to(at::kInt), latent.to(at::kInt), w.to(at::kInt), "q: expected bf16, fp32 or fp64, got Int"},
  };
  for (const Refused& c : all) expect_refused(fused_latent_attention, c);
}

TEST(LatentInputs, WithoutGradientsTheWeightMayBeNarrower) {
  const Tensor q = seeded_normal({1, 9, 3, 8 + 4}, 1.0, 1, "q"),
               latent = seeded_normal({1, 9, 10 + 4}, 1.0, 1, "latent");
  const Tensor w = seeded_normal({3 * (8 + 8), 10}, 1.0, 1, "w").to(at::kBFloat16);
  const KeyRanges visible(1, 9, 9, std::vector<Range>(9, Range{0, 9}));
  const Tensor want = fused_latent_attention(q, latent, w.to(at::kFloat), visible, 0.3);
  EXPECT_TRUE(fused_latent_attention(q, latent, w, visible, 0.3).equal(want));
}

std::string bug_in(const std::function<void()>& body) {
  try {
    body();
  } catch (const InternalError& error) {
    return error.what();
  }
  return "none";
}

// As of what autograd saves itself: a change between the passes would make every gradient wrong.
TEST(FusedAttention, OutChangedInPlaceBeforeTheBackwardPassIsABug) {
  const AttentionCase c = random_case(causal(1, 9), 3, 3, at::kFloat);
  const Tensor out = fused_attention(c.q, c.k, c.v, c.visible, kScale);
  const at::NoGradGuard no_grad;
  out.mul_(2);
  EXPECT_THAT(bug_in([&] { out.backward(c.grad); }),
              HasSubstr("'out' was changed in place after the forward pass: expected version "));
}

// Their gradients would come back without history.
TEST(Attention, SecondDerivativesAreRefused) {
  const AttentionCase c = random_case(causal(1, 9), 3, 3, at::kFloat);
  const auto twice = [&](AttentionKernel kernel) {
    const Tensor out = kernel(c.q, c.k, c.v, c.visible, kScale);
    torch::autograd::grad({out}, c.inputs(), {c.grad}, /*retain_graph=*/true, /*create_graph=*/true);
  };
  EXPECT_THAT(bug_in([&] { twice(eager_attention); }), HasSubstr("the gradient of 'eager attention' is not differ"));
  EXPECT_THAT(bug_in([&] { twice(fused_attention); }), HasSubstr("the gradient of 'fused attention' is not differ"));
}

}  // namespace
}  // namespace parlat
