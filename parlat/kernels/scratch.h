#pragma once

#include <ATen/ATen.h>

#include "parlat/tensor/memory_meter.h"

namespace parlat {

// A matrix of up to `size` elements that is filled anew again and again.
class Scratch {
 public:
  Scratch(int64_t size, const at::TensorOptions& options) : room_(metered("scratch", at::empty({size}, options))) {}
  at::Tensor matrix(int64_t n_rows, int64_t n_columns) const {
    return room_.narrow(0, 0, n_rows * n_columns).view({n_rows, n_columns});
  }
  at::ScalarType dtype() const { return room_.scalar_type(); }
  // x in the scratch's dtype and in consecutive memory, since rows of one head lie pages apart; x itself if it is that.
  at::Tensor packed(const at::Tensor& x) const {
    return x.is_contiguous() ? converted(x) : matrix(x.size(0), x.size(1)).copy_(x);
  }
  // x in the scratch's dtype; x itself if it has that already.
  at::Tensor converted(const at::Tensor& x) const {
    return x.scalar_type() == room_.scalar_type() ? x : matrix(x.size(0), x.size(1)).copy_(x);
  }

 private:
  at::Tensor room_;
};

// x in dtype: x itself if it has that already.
inline at::Tensor widened(const at::Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype ? x : metered("scratch", x.to(dtype));
}

}  // namespace parlat
