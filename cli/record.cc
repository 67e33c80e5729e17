#include "cli/record.h"

#include <cstdlib>
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

// Torch is not asked, whose libraries take longer to load than a plan to make.
const char* isa() {
#ifdef __x86_64__
  const bool fma = __builtin_cpu_supports("fma");
  if (fma && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    return "AVX512";
  }
  if (fma && __builtin_cpu_supports("avx2")) return "AVX2";
#endif
  return "DEFAULT";
}

}  // namespace

BuildInfo build_info() { return {.version = PARLAT_VERSION, .commit = PARLAT_COMMIT}; }

nlohmann::json machine_json() {
  nlohmann::json machine = {{"cpu", cpu_name()},
                            {"cores", std::thread::hardware_concurrency()},
                            {"isa", isa()},
                            {"memory_bytes", memory_limit()}};
  if (const char* const forced = std::getenv("PARLAT_ISA"); forced != nullptr && *forced != '\0') {
    machine["forced_isa"] = forced;
  }
  return machine;
}

nlohmann::json make_record(const std::string& command, const nlohmann::json& config, const nlohmann::json& rows) {
  const BuildInfo build = build_info();
  return {{"command", command},        {"version", build.version}, {"commit", build.commit},
          {"machine", machine_json()}, {"config", config},         {"rows", rows}};
}

}  // namespace parlat
