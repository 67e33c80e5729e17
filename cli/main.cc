// The program `parlat`. A plan is made here, without torch, whose libraries take longer to load than a plan to make;
// everything else is the program beside this one, parlat-torch (cli/torch_main.cc), which has all commands.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "cli/commands.h"
#include "cli/common.h"
#include "cli/program.h"
#include "parlat/base/error.h"

namespace parlat {
namespace {

// A --config may have flags of any command, which only parlat-torch knows.
bool is_plan(int argc, char** argv) {
  if (argc < 3 || std::string_view(argv[1]) != "plan") return false;
  for (int i = 3; i < argc; ++i) {
    if (std::string_view(argv[i]).starts_with("--config")) return false;
  }
  const std::string_view what = argv[2];
  return what == "train" || what == "decode";
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
  if (!parlat::is_plan(argc, argv)) return parlat::become_torch_program(argv);
  return parlat::run_program(argc, argv, [](CLI::App& app) { parlat::add_plan(app); });
}
