#include "cli/program.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <optional>

#include "cli/common.h"
#include "cli/config_file.h"
#include "cli/record.h"
#include "parlat/base/error.h"

namespace parlat {
namespace {

// CLI11 says only that a subcommand is required, or what was not expected. Nothing where neither was the mistake.
std::optional<ConfigError> wrong_words(const CLI::App& app) {
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  const std::string got = rest.empty() ? "none" : "'" + rest.front() + "'";
  const CLI::App* given = &app;
  while (!given->get_subcommands().empty()) given = given->get_subcommands().front();
  if (given->get_require_subcommand_min() > 0) {
    std::string names;
    for (const CLI::App* const known : given->get_subcommands([](const CLI::App*) { return true; })) {
      names += (names.empty() ? "" : ", ") + known->get_name();
    }
    return ConfigError("{}: expected one of {}, got {}", given->get_name(), names, got);
  }
  if (rest.empty()) return std::nullopt;
  return ConfigError("{}: expected nothing but the flags of --help, got {}", given->get_name(), got);
}

template <typename Number>
std::string check_number(std::string& text) {
  Number number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || (std::is_floating_point_v<Number> && !std::isfinite(number))) {
    if constexpr (std::is_floating_point_v<Number>) return fmt::format("expected a finite number, got '{}'", text);
    using Limits = std::numeric_limits<Number>;
    const bool is_integer = error == std::errc::result_out_of_range || text.starts_with('-');
    if (!is_integer) return fmt::format("expected an integer, got '{}'", text);
    return fmt::format("expected an integer from {} to {}, got '{}'", Limits::min(), Limits::max(), text);
  }
  text = fmt::format("{}", number);
  return "";
}

// Before a flag's own checks. To CLI11, "" is 0, -1 a large seed, 2^64 a smaller one and 010 is 8; NaN is within every
// range.
void check_numbers(CLI::App& app) {
  const std::pair<std::string, std::string (*)(std::string&)> kinds[] = {
      {"INT", check_number<int64_t>}, {"UINT", check_number<uint64_t>}, {"FLOAT", check_number<double>}};
  for (CLI::Option* const option : app.get_options()) {
    for (const auto& [type, check] : kinds) {
      if (option->get_type_name().starts_with(type)) option->transform(CLI::Validator(check, ""));
    }
  }
  for (CLI::App* const command : app.get_subcommands([](const CLI::App*) { return true; })) check_numbers(*command);
}

// Of list-valued flags on the command line: CLI11 passes over empty elements.
void check_lists(CLI::App& app, int argc, char** argv) {
  CLI::App* command = &app;
  const CLI::Option* option = nullptr;  // whose values follow
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (!word.starts_with("--")) {
      const auto named = command->get_subcommands([&](const CLI::App* known) { return known->get_name() == word; });
      if (!named.empty()) command = named.front();
    } else {
      const size_t name_end = std::min(word.find('='), word.size());
      option = command->get_option_no_throw(word.substr(0, name_end));
      if (name_end == word.size()) continue;
      word.erase(0, name_end + 1);
    }
    if (option != nullptr && option->get_delimiter() == ',') split_list(option->get_name().substr(2), word);
  }
}

// Whether the command line, or the file that it names, says --ranks mpi.
bool is_one_of_several(const CLI::App& app, int argc, char** argv) {
  if (std::any_of(argv, argv + argc, [](std::string_view word) { return word == "mpi" || word == "--ranks=mpi"; })) {
    return true;
  }
  for (const CLI::App* command = &app; command != nullptr;) {
    const CLI::Option* const ranks = command->get_option_no_throw("--ranks");
    if (ranks != nullptr && ranks->count() > 0 && ranks->results().back() == "mpi") return true;
    const auto chosen = command->get_subcommands();
    command = chosen.empty() ? nullptr : chosen.front();
  }
  return false;
}

int run(CLI::App& app, const ConfigFile& config_file, int argc, char** argv) {
  const auto report = [&](const std::exception& error) {
    return report_error(error, is_one_of_several(app, argc, argv));
  };
  try {
    check_lists(app, argc, argv);
    app.parse(argc, argv);
    flush_stdout();
    return 0;
  } catch (const CLI::Success& done) {  // --help, --version
    return app.exit(done);
  } catch (const CLI::RuntimeError& done) {
    return done.get_exit_code();
  } catch (const CLI::FileError& error) {
    return report(DataError("{}", error.what()));
  } catch (const CLI::ParseError& error) {
    return report(wrong_words(app).value_or(ConfigError("{}", error.what())));
  } catch (const ConfigError& error) {
    return report(ConfigError("{}", config_file.located(error.what())));
  } catch (const std::bad_alloc&) {
    return report(ConfigError("memory: expected what was asked for to fit, got more than there is"));
  } catch (const std::exception& error) {
    return report(error);
  }
}

}  // namespace

int run_program(int argc, char** argv, const std::function<void(CLI::App&)>& add_commands) {
  const BuildInfo build = build_info();
  CLI::App app("Train and serve models with Multi-head Latent Attention", "parlat");
  app.set_version_flag("--version", fmt::format("parlat {} ({})", build.version, build.commit));
  app.set_config("--config", "", "TOML file with the flags of a subcommand under [its name]; the command line wins");
  const auto config_file = std::make_shared<ConfigFile>(app);
  app.config_formatter(config_file);
  app.require_subcommand(1);
  app.fallthrough();
  app.option_defaults()->take_last();  // of a flag given twice
  add_commands(app);
  check_numbers(app);
  return run(app, *config_file, argc, argv);
}

}  // namespace parlat
