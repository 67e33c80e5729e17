#pragma once

#include <c10/core/ScalarType.h>

namespace parlat {

// The FLOP/s that this thread's largest matrix products reach now, with whatever else the machine is doing: the best of
// several 512^3 products in `dtype` by the kernel the model uses. Takes about 50 ms. What utilisation is measured
// against.
double measure_gemm_rate(at::ScalarType dtype);

}  // namespace parlat
