#include "parlat/train/forms.h"

#include "parlat/base/error.h"
#include "parlat/train/absorbed.h"
#include "parlat/train/explicit.h"
#include "parlat/train/laga.h"
#include "parlat/train/laga_q.h"
#include "parlat/train/ring.h"

namespace parlat {

std::unique_ptr<Attention> make_attention(TrainForm form, Communicator& comm, const MlaDims& dims,
                                          AttentionOptions options) {
  validate_form(form, comm.size(), dims.n_heads, dims.d_q_latent.has_value(), options);
  switch (form) {
    case TrainForm::kExplicit:
      return std::make_unique<ExplicitAttention>(comm, options);
    case TrainForm::kAbsorbed:
      return std::make_unique<AbsorbedAttention>(comm, options);
    case TrainForm::kLaga:
      return std::make_unique<LagaAttention>(comm, options);
    case TrainForm::kLagaQ:
      return std::make_unique<LagaQAttention>(comm, options);
    case TrainForm::kRing:
    case TrainForm::kHybrid:
      return std::make_unique<RingAttention>(comm, ring_groups(form, comm.size(), dims.n_heads, options));
  }
  throw InternalError(fmt::format("no attention is registered for form {}", static_cast<int>(form)));
}

}  // namespace parlat
