#pragma once

#include "parlat/comm/communicator.h"
#include "parlat/model/attention.h"

namespace parlat {

// explicit, absorbed and laga in an order of operations that explains how the peaks of the LAGA paper's Tables 2 and 4
// (arXiv 2607.17644) differ: for the dry run only, to take those figures apart. Projections and exchanges are parlat's;
// attention is torch's plain operations under its own autograd, scores in the activations' dtype, without a mask.
//   eager   scores = q k^T, scaled, softmax, times v. The peak is explicit's backward pass: probabilities, their
//           gradient and the scores' gradient, 3 score matrices. absorbed adds a latent and a rope score product, and
//           both are alive while the scaled sum becomes probabilities: 4, in the forward pass. Weights' gradients are
//           allocated when autograd comes to them, so that w_o's, D H V, is part of explicit's peak alone.
//   fused   explicit and laga write no scores. absorbed hands its rope scores to the kernel as a bias to be added,
//           which is saved and has a gradient: 2 score matrices. Weights are to have no gradients: both peaks lie in
//           the backward pass.
//   both    absorbed repeats latents for every head as keys and as values.
class PublishedAttention final : public Attention {
 public:
  // Throws what validate_published_form does.
  PublishedAttention(TrainForm form, Communicator& comm, const MlaDims& dims, AttentionOptions options);

  // x_BSD: this rank's tokens [B, S/P, D], of the meta device where the kernel is fused. Returns [B, S/P, D].
  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override;

 private:
  Tensor attend(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens, const Tensor& q_BSHd) const;

  TrainForm form_;
  Communicator& comm_;
  AttentionKernel kernel_;
};

// Throws ConfigError for other forms than these three.
void validate_published_form(TrainForm form);

}  // namespace parlat
