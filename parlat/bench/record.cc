#include "parlat/bench/record.h"

#include <ATen/Version.h>

#include <fstream>
#include <thread>

#include "build_info.h"
#include "parlat/base/memory_limit.h"

namespace parlat {

namespace {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace

BuildInfo build_info() { return {.version = PARLAT_VERSION, .commit = PARLAT_COMMIT}; }

nlohmann::json machine_json() {
  return {{"cpu", cpu_name()},
          {"cores", std::thread::hardware_concurrency()},
          {"isa", at::get_cpu_capability()},
          {"memory_bytes", memory_limit()}};
}

nlohmann::json make_record(const std::string& command, const nlohmann::json& config, const nlohmann::json& rows) {
  const BuildInfo build = build_info();
  return {{"command", command},        {"version", build.version}, {"commit", build.commit},
          {"machine", machine_json()}, {"config", config},         {"rows", rows}};
}

}  // namespace parlat
