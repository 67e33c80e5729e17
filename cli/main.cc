// parlat: one subcommand a file (cli/commands.h). Exit codes: 0; 1 our own bug or a run that diverged, 2 what was asked
// for cannot be done, 3 a file, 4 a peer, 130 interrupted.
#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>

#include "cli/commands.h"
#include "cli/common.h"
#include "cli/config_file.h"
#include "parlat/base/error.h"
#include "parlat/bench/record.h"

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

int run(CLI::App& app, const ConfigFile& config_file, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    flush_stdout();
    return 0;
  } catch (const CLI::Success& done) {  // --help, --version
    return app.exit(done);
  } catch (const CLI::RuntimeError& done) {
    return done.get_exit_code();
  } catch (const CLI::FileError& error) {
    return report_error(DataError("{}", error.what()));
  } catch (const CLI::ParseError& error) {
    return report_error(wrong_words(app).value_or(ConfigError("{}", error.what())));
  } catch (const ConfigError& error) {
    return report_error(ConfigError("{}", config_file.located(error.what())));
  } catch (const std::bad_alloc&) {
    return report_error(ConfigError("memory: expected what was asked for to fit, got more than there is"));
  } catch (const std::exception& error) {
    return report_error(error);
  }
}

}  // namespace
}  // namespace parlat

int main(int argc, char** argv) {
  // Large tensors on large pages, unless the environment says otherwise: torch reads this at its first allocation.
  ::setenv("THP_MEM_ALLOC_ENABLE", "1", /*overwrite=*/0);
  const parlat::BuildInfo build = parlat::build_info();
  CLI::App app("Train and serve models with Multi-head Latent Attention", "parlat");
  app.set_version_flag("--version", fmt::format("parlat {} ({})", build.version, build.commit));
  app.set_config("--config", "", "TOML file with the flags of a subcommand under [its name]; the command line wins");
  const auto config_file = std::make_shared<parlat::ConfigFile>(app);
  app.config_formatter(config_file);
  app.require_subcommand(1);
  app.fallthrough();
  app.option_defaults()->take_last();  // of a flag given twice
  parlat::add_train(app);
  parlat::add_inspect(app);
  parlat::add_verify(app);
  parlat::add_eval(app);
  parlat::add_generate(app);
  parlat::add_convert(app);
  parlat::add_plan(app);
  parlat::add_bench(app);
  parlat::check_numbers(app);
  const int exit_code = parlat::run(app, *config_file, argc, argv);
  parlat::finalize_mpi();
  return exit_code;
}
