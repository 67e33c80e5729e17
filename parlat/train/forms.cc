#include "parlat/train/forms.h"

#include "parlat/base/error.h"
#include "parlat/train/absorbed.h"
#include "parlat/train/explicit.h"
#include "parlat/train/laga.h"

namespace parlat {

std::unique_ptr<Attention> make_attention(TrainForm form, Communicator& comm, int64_t n_heads) {
  validate_head_split(form, comm.size(), n_heads);
  switch (form) {
    case TrainForm::kExplicit:
      return std::make_unique<ExplicitAttention>(comm);
    case TrainForm::kAbsorbed:
      return std::make_unique<AbsorbedAttention>(comm);
    case TrainForm::kLaga:
      return std::make_unique<LagaAttention>(comm);
  }
  throw InternalError(fmt::format("no attention is registered for form {}", static_cast<int>(form)));
}

}  // namespace parlat
