#pragma once

#include <nlohmann/json.hpp>
#include <vector>

namespace parlat {

// What repeated measurements of one thing say. p90: the smallest value that at least 90 % of them do not exceed.
struct Spread {
  double min = 0, median = 0, p90 = 0;
};
// Of at least one value; the median of an even number is the mean of the middle two.
Spread spread_of(std::vector<double> values);
nlohmann::json to_json(const Spread& spread);

}  // namespace parlat
