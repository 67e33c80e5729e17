#pragma once

#include <string>
#include <vector>

#include "parlat/tensor/memory_meter.h"

namespace parlat {

// What a peak of memory consists of, as cells {tensor, bytes, share}: each that is a hundredth of it or more, then the
// others together.
std::vector<std::vector<std::string>> peak_cells(const std::vector<MemoryMeter::Site>& sites);

}  // namespace parlat
