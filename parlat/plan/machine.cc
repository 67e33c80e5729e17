#include "parlat/plan/machine.h"

#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include "parlat/base/error.h"
#include "parlat/config/json_fields.h"
#include "shipped_machines.h"

namespace parlat {

namespace {

constexpr double kMost = 1e18;  // of any figure, in the unit of its key
constexpr const char *kNumber = "a number above 0 and at most 1e18",
                     *kNumbers = "a list of numbers above 0 and at most 1e18";
constexpr int64_t kMostRanks = int64_t{1} << 20, kMostWidth = int64_t{1} << 40;
constexpr double kGiga = 1e9, kTera = 1e12, kMicro = 1e-6;

double positive(JsonFields& fields, const std::string& key) {
  const nlohmann::json* const value = fields.find(key);
  const double number = value != nullptr && value->is_number() ? value->get<double>() : 0;
  if (!(0 < number && number <= kMost)) fields.refuse(key, kNumber);
  return number;
}

std::optional<double> optional_positive(JsonFields& fields, const std::string& key) {
  return fields.object().contains(key) ? std::optional(positive(fields, key)) : std::nullopt;
}

std::vector<double> positive_list(JsonFields& fields, const std::string& key) {
  const nlohmann::json* const list = fields.find(key);
  const auto is_positive = [](const nlohmann::json& x) {
    return x.is_number() && 0 < x.get<double>() && x.get<double>() <= kMost;
  };
  if (list == nullptr || !list->is_array() || list->empty() || !std::all_of(list->begin(), list->end(), is_positive)) {
    fields.refuse(key, kNumbers);
  }
  return list->get<std::vector<double>>();
}

void refuse_unknown(const JsonFields& fields) {
  if (const auto unread = fields.unread(); !unread.empty()) fields.refuse(unread.front(), "no key of this name");
}

// Reads the table `key` of `parent` with body(fields of it), and refuses keys that body has not asked for.
template <typename Body>
auto read_table(JsonFields& parent, const std::string& where, const std::string& key, const Body& body) {
  const nlohmann::json* const table = parent.find(key);
  if (table == nullptr || !table->is_object()) parent.refuse(key, "a table");
  JsonFields fields(*table, where + key + ".");
  auto result = body(fields, where + key + ".");
  refuse_unknown(fields);
  return result;
}

Link read_link(JsonFields& fields, const std::string& /*where*/) {
  Link link{.latency_s = positive(fields, "latency_us") * kMicro, .bytes_per_s = positive(fields, "gb_per_s") * kGiga};
  if (const auto latency = optional_positive(fields, "decode_latency_us")) link.decode_latency_s = *latency * kMicro;
  return link;
}

RateCurve read_curve(JsonFields& fields, const std::string& /*where*/) {
  RateCurve curve{.sizes = positive_list(fields, "size"), .rates = positive_list(fields, "tflops")};
  if (curve.sizes.size() != curve.rates.size()) {
    fields.refuse("tflops", fmt::format("{} numbers, one for each size", curve.sizes.size()));
  }
  if (std::adjacent_find(curve.sizes.begin(), curve.sizes.end(), std::greater_equal<>()) != curve.sizes.end()) {
    fields.refuse("size", "growing numbers");
  }
  for (double& rate : curve.rates) rate *= kTera;
  return curve;
}

AttentionRates read_attention(JsonFields& fields, const std::string& /*where*/) {
  AttentionRates rates;
  rates.fused = {positive(fields, "fused_forward_tflops") * kTera, positive(fields, "fused_backward_tflops") * kTera};
  if (const auto forward = optional_positive(fields, "eager_forward_tflops")) {
    rates.eager = KernelRate{*forward * kTera, positive(fields, "eager_backward_tflops") * kTera};
  }
  if (fields.object().contains("widest_fused")) rates.widest_fused = fields.integer("widest_fused", 0, 1, kMostWidth);
  if (fields.object().contains("written_share")) {
    rates.written_share = positive(fields, "written_share");
    if (rates.written_share > 1) fields.refuse("written_share", "a number above 0 and at most 1");
  }
  if (const auto rate = optional_positive(fields, "decode_tflops")) rates.decode_rate = *rate * kTera;
  return rates;
}

// Calls read(table) for each key of a table of tables by dtype.
template <typename Read>
auto read_by_dtype(JsonFields& fields, const std::string& where, const Read& read) {
  std::map<std::string, decltype(read(fields, where))> by_dtype;
  const std::string key = where.substr(0, where.size() - 1);  // without the dot
  if (fields.object().empty()) throw ConfigError("{}: expected a table for a dtype, got none", key);
  for (const auto& [dtype, table] : fields.object().items()) {
    dtype_bytes(dtype, key);
    by_dtype[dtype] = read_table(fields, where, dtype, read);
  }
  return by_dtype;
}

int64_t count(JsonFields& fields, const std::string& key, std::optional<int64_t> absent = std::nullopt) {
  if (!absent && fields.find(key) == nullptr) fields.refuse(key, "an integer above 0");
  return fields.integer(key, absent.value_or(1), 1, kMostRanks);
}

Machine read_machine(const nlohmann::json& json, const std::string& name) {
  const std::string where = name + ": ";
  JsonFields fields(json, where);
  Machine machine;
  machine.name = name;
  machine.ranks_per_node = count(fields, "ranks_per_node");
  machine.ranks_at_full_rate = count(fields, "ranks_at_full_rate", machine.ranks_per_node);
  machine.memory_bytes = positive(fields, "memory_gb") * kGiga;
  machine.memory_bytes_per_s = positive(fields, "memory_gb_per_s") * kGiga;
  if (fields.find("overlap") == nullptr) fields.refuse("overlap", "a number from 0 to 1");
  machine.overlap = fields.number("overlap", 0, 0, 1);
  machine.layer_overhead_s = positive(fields, "layer_overhead_us") * kMicro;
  machine.hierarchical_gather = fields.boolean("hierarchical_gather", false);
  read_table(fields, where, "link", [&](JsonFields& links, const std::string& at) {
    machine.within = read_table(links, at, "within", read_link);
    if (links.object().contains("between")) machine.between = read_table(links, at, "between", read_link);
    return true;
  });
  machine.gemm = read_table(fields, where, "gemm", [&](JsonFields& dtypes, const std::string& at) {
    return read_by_dtype(dtypes, at, read_curve);
  });
  machine.attention = read_table(fields, where, "attention", [&](JsonFields& dtypes, const std::string& at) {
    return read_by_dtype(dtypes, at, read_attention);
  });
  refuse_unknown(fields);
  return machine;
}

std::string numbers(const std::vector<double>& values, double unit) {
  std::string text;
  for (const double value : values) text += fmt::format("{}{:.4g}", text.empty() ? "" : ", ", value / unit);
  return text;
}

std::string known_dtypes(const auto& by_dtype) {
  std::string text;
  for (const auto& [dtype, rates] : by_dtype) text += (text.empty() ? "" : ", ") + dtype;
  return text;
}

}  // namespace

double RateCurve::at(double size) const {
  const size_t next = std::upper_bound(sizes.begin(), sizes.end(), size) - sizes.begin();
  if (next == 0) return rates.front();
  if (next == sizes.size()) return rates.back();
  const double share = std::log(size / sizes[next - 1]) / std::log(sizes[next] / sizes[next - 1]);
  return rates[next - 1] + share * (rates[next] - rates[next - 1]);
}

const RateCurve& Machine::gemm_in(const std::string& dtype) const {
  const auto found = gemm.find(dtype);
  if (found == gemm.end()) {
    throw ConfigError("{}: gemm.{}: expected a table of this dtype, got {}", name, dtype, known_dtypes(gemm));
  }
  return found->second;
}

const AttentionRates& Machine::attention_in(const std::string& dtype) const {
  const auto found = attention.find(dtype);
  if (found == attention.end()) {
    throw ConfigError("{}: attention.{}: expected a table of this dtype, got {}", name, dtype, known_dtypes(attention));
  }
  return found->second;
}

const Link& Machine::between_nodes() const {
  if (!between)
    throw ConfigError("{}: link.between: expected a table, since ranks are on several nodes, got none", name);
  return *between;
}

Machine parse_machine(const std::string& toml, const std::string& name) {
  try {
    std::ostringstream json;
    json << toml::json_formatter(toml::parse(toml));
    return read_machine(nlohmann::json::parse(json.str()), name);
  } catch (const toml::parse_error& error) {
    throw DataError("{}: line {}: expected TOML, got: {}", name, error.source().begin.line, error.description());
  }
}

Machine load_machine(const std::string& path_or_name) {
  std::error_code ignored;
  if (std::ifstream file(path_or_name); file && !std::filesystem::is_directory(path_or_name, ignored)) {
    return parse_machine({std::istreambuf_iterator<char>(file), {}}, path_or_name);
  }
  for (const auto& [name, text] : kShippedMachines) {
    if (path_or_name == name || path_or_name == std::string(name) + ".toml") {
      return parse_machine(std::string(text), std::string(name));
    }
  }
  std::string names;
  for (const std::string& name : shipped_machine_names()) names += (names.empty() ? "" : ", ") + name;
  throw DataError("machine: expected a file that can be read or one of {}, got {}", names, path_or_name);
}

std::vector<std::string> shipped_machine_names() {
  std::vector<std::string> names;
  for (const auto& [name, text] : kShippedMachines) names.emplace_back(name);
  return names;
}

std::string to_toml(const Machine& machine) {
  std::string text = fmt::format(
      "ranks_per_node = {}\nranks_at_full_rate = {}\nmemory_gb = {:.4g}\nmemory_gb_per_s = {:.4g}\noverlap = {:.3g}\n"
      "layer_overhead_us = {:.4g}\nhierarchical_gather = {}\n",
      machine.ranks_per_node, machine.ranks_at_full_rate, machine.memory_bytes / kGiga,
      machine.memory_bytes_per_s / kGiga, machine.overlap, machine.layer_overhead_s / kMicro,
      machine.hierarchical_gather);
  const auto add_link = [&](const char* link, const Link& at) {
    text += fmt::format("\n[link.{}]\nlatency_us = {:.4g}\ngb_per_s = {:.4g}\n", link, at.latency_s / kMicro,
                        at.bytes_per_s / kGiga);
    if (at.decode_latency_s) text += fmt::format("decode_latency_us = {:.4g}\n", *at.decode_latency_s / kMicro);
  };
  add_link("within", machine.within);
  if (machine.between) add_link("between", *machine.between);
  for (const auto& [dtype, curve] : machine.gemm) {
    text += fmt::format("\n[gemm.{}]\nsize = [{}]\ntflops = [{}]\n", dtype, numbers(curve.sizes, 1),
                        numbers(curve.rates, kTera));
  }
  for (const auto& [dtype, rates] : machine.attention) {
    text += fmt::format("\n[attention.{}]\n", dtype);
    const auto add = [&](const char* key, double value) { text += fmt::format("{} = {:.4g}\n", key, value); };
    add("fused_forward_tflops", rates.fused.forward / kTera);
    add("fused_backward_tflops", rates.fused.backward / kTera);
    if (rates.eager) {
      add("eager_forward_tflops", rates.eager->forward / kTera);
      add("eager_backward_tflops", rates.eager->backward / kTera);
    }
    if (rates.widest_fused) text += fmt::format("widest_fused = {}\n", *rates.widest_fused);
    if (rates.written_share < 1) add("written_share", rates.written_share);
    if (rates.decode_rate) add("decode_tflops", *rates.decode_rate / kTera);
  }
  return text;
}

void check_ranks(const Machine& machine, int64_t ranks, int64_t nodes) {
  if (ranks < 1 || ranks > kMostRanks) throw ConfigError("ranks: expected 1 to {}, got {}", kMostRanks, ranks);
  if (nodes < 1 || ranks % nodes != 0) {
    throw ConfigError("nodes: expected a divisor of the {} ranks, got {}", ranks, nodes);
  }
  if (ranks / nodes > machine.ranks_per_node) {
    throw ConfigError("ranks: expected at most {} on each of {} node{} of {}, got {}", machine.ranks_per_node, nodes,
                      nodes > 1 ? "s" : "", machine.name, ranks / nodes);
  }
  if (nodes > 1) machine.between_nodes();
}

int64_t dtype_bytes(const std::string& dtype, const std::string& where) {
  if (dtype == "bf16") return 2;
  if (dtype == "fp32") return 4;
  if (dtype == "fp64") return 8;
  throw ConfigError("{}: expected bf16, fp32 or fp64, got '{}'", where, dtype);
}

}  // namespace parlat
