#include "parlat/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "parlat/base/printable.h"

namespace parlat {

namespace {

spdlog::logger& logger() {
  static const auto kLogger = [] {
    auto made = spdlog::stderr_logger_mt("parlat");
    made->set_pattern("%n: %v");
    return made;
  }();
  return *kLogger;
}

}  // namespace

void log_info(const std::string& line) { logger().info(printable(line)); }
void log_warning(const std::string& line) { logger().warn("warning: {}", printable(line)); }
void set_quiet(bool quiet) { logger().set_level(quiet ? spdlog::level::warn : spdlog::level::info); }

}  // namespace parlat
