#pragma once

#include <algorithm>
#include <string>

#include "parlat/config/parallel.h"

namespace parlat {

// As gtest wants the names of parameters: laga_q.
inline std::string test_name(TrainForm form) {
  std::string text(name(form));
  std::replace(text.begin(), text.end(), '-', '_');
  return text;
}

}  // namespace parlat
