// parlat: one subcommand a file (cli/commands.h). Exit codes: 0; 1 our own bug or a run that diverged, 2 what was asked
// for cannot be done, 3 a file, 4 a peer, 130 interrupted.
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/common.h"
#include "parlat/base/error.h"
#include "parlat/bench/record.h"

namespace parlat {
namespace {

// CLI11 says only that a subcommand is required. Nothing where that was not the mistake.
std::optional<ConfigError> wrong_subcommand(const CLI::App& app) {
  const CLI::App* given = &app;
  while (!given->get_subcommands().empty()) given = given->get_subcommands().front();
  if (given->get_require_subcommand_min() == 0) return std::nullopt;
  std::string names;
  for (const CLI::App* const known : given->get_subcommands([](const CLI::App*) { return true; })) {
    names += (names.empty() ? "" : ", ") + known->get_name();
  }
  const std::vector<std::string> rest = given->remaining();
  return ConfigError("{}: expected one of {}, got {}", given->get_name(), names,
                     rest.empty() ? "none" : "'" + rest.front() + "'");
}

int run(CLI::App& app, int argc, char** argv) {
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
    return report_error(wrong_subcommand(app).value_or(ConfigError("{}", error.what())));
  } catch (const std::exception& error) {
    return report_error(error);
  }
}

}  // namespace
}  // namespace parlat

int main(int argc, char** argv) {
  const parlat::BuildInfo build = parlat::build_info();
  CLI::App app("Train and serve models with Multi-head Latent Attention", "parlat");
  app.set_version_flag("--version", fmt::format("parlat {} ({})", build.version, build.commit));
  app.set_config("--config", "", "TOML file with the flags of a subcommand under [its name]; the command line wins");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.require_subcommand(1);
  app.fallthrough();
  app.option_defaults()->take_last();  // of a flag given twice
  parlat::add_train(app);
  parlat::add_inspect(app);
  parlat::add_verify(app);
  parlat::add_eval(app);
  parlat::add_generate(app);
  parlat::add_convert(app);
  parlat::add_bench(app);
  const int exit_code = parlat::run(app, argc, argv);
  parlat::finalize_mpi();
  return exit_code;
}
