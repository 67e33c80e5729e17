// The program `parlat`. A plan is made here, without torch, whose libraries take longer to load than a plan to make;
// everything else is the program beside this one, parlat-torch (cli/torch_main.cc), which has all commands.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/common.h"
#include "cli/program.h"
#include "parlat/base/error.h"

namespace parlat {
namespace {

bool is_plan(std::string_view command) { return command == "train" || command == "decode"; }

// Whether the file has no flags of other commands, which only parlat-torch knows. One that cannot be read is left to
// it.
bool has_only_plans(const std::string& config) {
  try {
    for (const CLI::ConfigItem& item : CLI::ConfigTOML().from_file(config)) {
      const std::vector<std::string>& section = item.parents;
      if (section.empty() || section[0] != "plan" || (section.size() > 1 && !is_plan(section[1]))) return false;
    }
    return true;
  } catch (const CLI::Error&) {
    return false;
  }
}

bool needs_no_torch(int argc, char** argv) {
  if (argc < 3 || std::string_view(argv[1]) != "plan" || !is_plan(argv[2])) return false;
  for (int i = 3; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--config" && i + 1 < argc && !has_only_plans(argv[i + 1])) return false;
    if (word.starts_with("--config=") && !has_only_plans(word.substr(word.find('=') + 1))) return false;
  }
  return true;
}

// Returns only if that fails.
int become_torch_program(char** argv) {
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  const std::filesystem::path other = program.parent_path() / "parlat-torch";
  ::execv(other.c_str(), argv);
  return report_error(DataError("{}: expected the program of all commands but plan train and plan decode, got: {}",
                                other.string(), std::strerror(errno)));
}

}  // namespace
}  // namespace parlat

int main(int argc, char** argv) {
  if (!parlat::needs_no_torch(argc, argv)) return parlat::become_torch_program(argv);
  return parlat::run_program(argc, argv, [](CLI::App& app) { parlat::add_plan(app); });
}
