#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace parlat {

// The version and commit this program was built from.
struct BuildInfo {
  std::string version, commit;
};
BuildInfo build_info();

// {cpu, cores, isa, memory_bytes} of this machine; isa is what torch's kernels choose here and what it calls that
// (AVX512, AVX2, ...). forced_isa, where PARLAT_ISA is set: what parlat's own kernels are held to.
nlohmann::json machine_json();

// What --json writes, of every command: {command, version, commit, machine, config, rows}.
nlohmann::json make_record(const std::string& command, const nlohmann::json& config, const nlohmann::json& rows);

}  // namespace parlat
