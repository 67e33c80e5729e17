#include "cli/config_file.h"

#include <fmt/format.h>

#include "cli/common.h"
#include "parlat/base/error.h"

namespace parlat {

namespace {

// Of the sections that an item lies in, or nothing where there is no such subcommand.
CLI::App* find_section(CLI::App& app, const std::vector<std::string>& names) {
  CLI::App* section = &app;
  for (const std::string& name : names) {
    const auto found = section->get_subcommands([&](const CLI::App* known) { return known->get_name() == name; });
    if (found.empty()) return nullptr;
    section = found.front();
  }
  return section;
}

// Empty, or what was expected in place of the values.
std::string set(CLI::Option& option, const CLI::ConfigItem& item) {
  const bool is_flag = option.get_expected_min() == 0;
  if (item.inputs.empty()) return "expected a value, got none";
  if (option.get_delimiter() == ',') {
    for (const std::string& input : item.inputs) split_list(option.get_name().substr(2), input);
  }
  if (is_flag ? item.inputs.size() != 1 : static_cast<int>(item.inputs.size()) > option.get_items_expected_max()) {
    return fmt::format("expected one value, got {}", CLI::detail::join(item.inputs, ", "));
  }
  try {
    if (is_flag) {
      option.add_result(option.get_flag_value(item.name, item.inputs.front()));
    } else {
      option.add_result(item.inputs);
    }
    option.run_callback();
  } catch (const CLI::ConversionError&) {
    return fmt::format("expected {}, got {}", is_flag ? "true or false" : option.get_type_name(),
                       CLI::detail::join(item.inputs, ", "));
  } catch (const CLI::ParseError& error) {
    const std::string text = error.what(), name = option.get_name() + ": ";
    return text.starts_with(name) ? text.substr(name.size()) : text;
  }
  return "";
}

}  // namespace

std::vector<CLI::ConfigItem> ConfigFile::from_config(std::istream& input) const {
  for (const CLI::ConfigItem& item : CLI::ConfigTOML::from_config(input)) apply(item);
  return {};
}

void ConfigFile::apply(const CLI::ConfigItem& item) const {
  const bool marks_section = item.name == "++" || item.name == "--";  // where one begins or ends
  std::vector<std::string> path = item.parents;
  if (!marks_section) path.push_back(item.name);
  const std::string place =
      fmt::format("{}: {}", app_.get_config_ptr()->as<std::string>(), CLI::detail::join(path, "."));

  CLI::App* const section = find_section(app_, item.parents);
  if (section != nullptr && marks_section) return;
  CLI::Option* const option = section != nullptr ? section->get_option_no_throw("--" + item.name) : nullptr;
  if (option == nullptr || !option->get_configurable()) {
    throw ConfigError("{}: expected a subcommand's flag under [its name], got no such one", place);
  }
  if (!section->parsed() || !option->empty()) return;
  places_[item.name] = place;
  if (const std::string problem = set(*option, item); !problem.empty()) throw ConfigError("{}: {}", place, problem);
}

std::string ConfigFile::located(const std::string& error) const {
  const size_t name_end = error.find(": ");
  const auto found = places_.find(error.substr(0, name_end));
  return found == places_.end() ? error : found->second + error.substr(name_end);
}

}  // namespace parlat
