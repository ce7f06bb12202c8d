#include "cpp/src/loader/rope_config.h"

#include <numeric>
#include <optional>

#include <nlohmann/json.hpp>

#include "cpp/src/check.h"

namespace deltaic {

namespace {

using nlohmann::json;

// The rotary fields of a config: the nested object, if there is one, before the text config itself.
struct RopeFields {
  const JsonFields& text;
  std::optional<JsonFields> nested;

  const JsonFields& holder(std::string_view key) const { return nested && nested->has(key) ? *nested : text; }
  std::optional<double> number(std::string_view key) const { return holder(key).number(key); }
  std::string full_name(std::string_view key) const { return holder(key).full_name(key); }
};

std::optional<JsonFields> nested_rope_fields(const JsonFields& text) {
  const auto parameters = text.object("rope_parameters");
  const auto scaling = text.object("rope_scaling");
  DELTAIC_CHECK(!parameters || !scaling || *text.find("rope_parameters") == *text.find("rope_scaling"),
                text.full_name("rope_parameters"), " and ", text.full_name("rope_scaling"),
                " are both given and differ: keep one");
  return parameters ? parameters : scaling;
}

RopeType read_type(const std::optional<JsonFields>& nested) {
  if (!nested) return RopeType::standard;
  const char* key = nested->has("rope_type") ? "rope_type" : "type";
  const std::string type = nested->text(key).value_or("default");
  if (type == "default") return RopeType::standard;
  if (type == "linear") return RopeType::linear;
  if (type == "yarn") return RopeType::yarn;
  throw Unsupported(detail::concat(nested->full_name(key), " is \"", type,
                                   "\"; deltaic has the rotary embeddings default, linear and yarn"));
}

double positive(const RopeFields& fields, std::string_view key, double value) {
  DELTAIC_CHECK(value > 0.0, fields.full_name(key), " is ", value, ", it must be above 0");
  return value;
}

void read_yarn(const RopeFields& fields, const JsonFields& nested, const ModelConfig& model, RopeConfig& rope) {
  for (const char* key : {"mscale", "mscale_all_dim"})
    if (nested.has(key)) throw Unsupported(detail::concat(nested.full_name(key), " is not supported"));
  constexpr const char* kOriginal = "original_max_position_embeddings";
  rope.original_max_position_embeddings =
      positive(fields, kOriginal, fields.number(kOriginal).value_or(model.max_position_embeddings));
  rope.beta_fast = positive(fields, "beta_fast", nested.number("beta_fast").value_or(rope.beta_fast));
  rope.beta_slow = positive(fields, "beta_slow", nested.number("beta_slow").value_or(rope.beta_slow));
  DELTAIC_CHECK(rope.beta_fast > rope.beta_slow, nested.full_name("beta_fast"), " is ", rope.beta_fast,
                ", it must be above beta_slow, which is ", rope.beta_slow);
  rope.truncate = nested.boolean("truncate").value_or(true);
  rope.attention_factor = nested.number("attention_factor");
  if (rope.attention_factor) positive(fields, "attention_factor", *rope.attention_factor);
}

// Sizes of the three position streams. A given list must cover the rotated channels; the default is cut by them.
std::array<int, 3> read_mrope_section(const RopeFields& fields, int num_frequencies) {
  std::array<int, 3> section{11, 11, 10};
  const JsonFields& holder = fields.holder("mrope_section");
  const json* list = holder.find("mrope_section");
  if (list == nullptr) return section;
  const std::string name = holder.full_name("mrope_section");
  DELTAIC_CHECK(list->is_array() && list->size() == section.size(), name, " is ", JsonFields::show(*list),
                ", not a list of 3 sizes");
  for (std::size_t i = 0; i < section.size(); ++i) {
    const json& size = (*list)[i];
    DELTAIC_CHECK(size.is_number_integer() && size.get<double>() >= 0 && size.get<double>() <= num_frequencies, name,
                  "[", i, "] is ", JsonFields::show(size), ", outside [0, ", num_frequencies, "]");
    section[i] = size.get<int>();
  }
  const int sum = std::accumulate(section.begin(), section.end(), 0);
  DELTAIC_CHECK(sum == num_frequencies, name, " is ", JsonFields::show(*list), " and sums to ", sum, ", but ",
                2 * num_frequencies, " channels rotate in ", num_frequencies, " pairs");
  return section;
}

// What the types besides the standard one are given in `nested`.
void read_scaling(const RopeFields& fields, const JsonFields& nested, const ModelConfig& model, RopeConfig& rope) {
  const std::optional<double> factor = nested.number("factor");
  DELTAIC_CHECK(factor.has_value(), nested.full_name("factor"), " is missing");
  DELTAIC_CHECK(*factor >= 1.0, nested.full_name("factor"), " is ", *factor, ", below 1");
  rope.factor = *factor;
  if (rope.type == RopeType::yarn) read_yarn(fields, nested, model, rope);
}

}  // namespace

void read_rope_config(const JsonFields& text, double default_partial_rotary_factor, ModelConfig& model) {
  const RopeFields fields{text, nested_rope_fields(text)};
  if (fields.nested) fields.nested->refuse_objects("one rotary embedding for all layers");
  RopeConfig& rope = model.rope;
  rope.type = read_type(fields.nested);
  rope.theta = positive(fields, "rope_theta", fields.number("rope_theta").value_or(rope.theta));

  constexpr const char* kPartial = "partial_rotary_factor";
  const double partial = fields.number(kPartial).value_or(default_partial_rotary_factor);
  DELTAIC_CHECK(partial > 0.0 && partial <= 1.0, fields.full_name(kPartial), " is ", partial, ", outside (0, 1]");
  model.rotary_dim = static_cast<int>(model.head_dim * partial);
  DELTAIC_CHECK(model.rotary_dim >= 2 && model.rotary_dim % 2 == 0, fields.full_name(kPartial), " is ", partial,
                " and head_dim is ", model.head_dim, ": ", model.rotary_dim,
                " channels would rotate, it must be an even number above 0");

  if (fields.nested && rope.type != RopeType::standard) read_scaling(fields, *fields.nested, model, rope);

  const bool has_mrope = model.architecture >= Architecture::qwen3_5;
  if (!has_mrope) return;
  rope.mrope_section = read_mrope_section(fields, model.rotary_dim / 2);
  const JsonFields& holder = fields.holder("mrope_interleaved");
  if (!holder.boolean("mrope_interleaved").value_or(true))
    throw Unsupported(holder.full_name("mrope_interleaved") + " is false; deltaic has interleaved M-RoPE alone");
}

}  // namespace deltaic
