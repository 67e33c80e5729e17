#include "cli/peak_sites.h"

#include <fmt/format.h>

#include "parlat/base/units.h"

namespace parlat {

std::vector<std::vector<std::string>> peak_cells(const std::vector<MemoryMeter::Site>& sites) {
  double peak = 0, others = 0;
  for (const MemoryMeter::Site& site : sites) peak += static_cast<double>(site.bytes);
  std::vector<std::vector<std::string>> lines;
  const auto add = [&](const std::string& name, double bytes) {
    lines.push_back({name, format_bytes(bytes), fmt::format("{:.1f} %", 100 * bytes / peak)});
  };
  for (const MemoryMeter::Site& site : sites) {
    const auto bytes = static_cast<double>(site.bytes);
    if (bytes >= peak / 100) {
      add(site.name, bytes);
    } else {
      others += bytes;
    }
  }
  if (others > 0) add("others", others);
  return lines;
}

}  // namespace parlat
