#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

namespace parlat {

// The TOML file that --config names. Its errors say which file and which key; CLI11's say neither, and of several
// values where one belongs CLI11 takes the last.
class ConfigFile : public CLI::ConfigTOML {
 public:
  explicit ConfigFile(CLI::App& app) : app_(app) {}

  // Sets the flags of the subcommand that was given, but for those of the command line, and leaves nothing for CLI11 to
  // set. Other subcommands' keys need only exist. Throws ConfigError.
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override;

  // An error about a flag ("lr: expected ...") that the file set, with file and section in front; any other as it is.
  std::string located(const std::string& error) const;

 private:
  void apply(const CLI::ConfigItem& item) const;

  CLI::App& app_;
  mutable std::map<std::string, std::string> places_;  // "run.toml: train.lr" of the flags set here
};

}  // namespace parlat
