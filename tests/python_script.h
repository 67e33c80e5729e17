#pragma once

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/temporary_folder.h"

namespace parlat {

// Runs a script with the Python that the build uses. Returns what it complained of, empty if it exited with 0.
inline std::string run_python(const std::filesystem::path& script, const std::vector<std::string>& arguments) {
  const TemporaryFolder folder;
  std::string command = fmt::format("'{}' '{}'", PARLAT_PYTHON, script.string());
  for (const std::string& argument : arguments) command += fmt::format(" '{}'", argument);
  command += fmt::format(" 2>'{}'", (folder / "log").string());
  if (std::system(command.c_str()) == 0) return "";  // NOLINT(bugprone-command-processor): a fixed command
  std::ostringstream log;
  log << command << ": " << std::ifstream(folder / "log").rdbuf();
  return log.str();
}

}  // namespace parlat
