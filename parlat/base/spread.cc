#include "parlat/base/spread.h"

#include <algorithm>

#include "parlat/base/error.h"

namespace parlat {

Spread spread_of(std::vector<double> values) {
  PARLAT_ASSERT(!values.empty(), "no measurements");
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  const size_t rank90 = (9 * n + 9) / 10;  // ceil(0.9 n)
  return {.min = values.front(), .median = (values[(n - 1) / 2] + values[n / 2]) / 2, .p90 = values[rank90 - 1]};
}

nlohmann::json to_json(const Spread& spread) {
  return {{"min", spread.min}, {"median", spread.median}, {"p90", spread.p90}};
}

}  // namespace parlat
