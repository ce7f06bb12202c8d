#include "cpp/src/loader/json_fields.h"

#include <cmath>
#include <set>
#include <vector>

#include <nlohmann/json.hpp>

#include "cpp/src/check.h"

namespace deltaic {

using nlohmann::json;

json parse_json(std::string_view text) {
  static constexpr int kDeepest = 64;       // some operations of the JSON library recurse
  std::vector<std::set<std::string>> keys;  // of the open objects
  const auto watch = [&keys](int depth, json::parse_event_t event, json& parsed) {
    DELTAIC_CHECK(depth <= kDeepest, "nested deeper than ", kDeepest, " levels");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      const auto key = parsed.get<std::string>();
      DELTAIC_CHECK(keys.back().insert(key).second, key, " is listed twice");
    }
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::exception& error) {
    throw InvalidArgument(detail::concat("not valid JSON: ", error.what()));
  }
}

std::string JsonFields::show(const json& value) {
  constexpr std::size_t kLongest = 60;
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

const json* JsonFields::find(std::string_view key) const {
  const auto found = object_->find(key);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

std::optional<int> JsonFields::integer(std::string_view key, std::int64_t smallest, std::int64_t largest) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  DELTAIC_CHECK(value->is_number_integer(), full_name(key), " is ", show(*value), ", not an integer");
  // An unsigned number beyond int64 would wrap in get<int64>.
  const bool fits =
      !value->is_number_unsigned() || value->get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX);
  DELTAIC_CHECK(fits && value->get<std::int64_t>() >= smallest && value->get<std::int64_t>() <= largest, full_name(key),
                " is ", show(*value), ", outside [", smallest, ", ", largest, "]");
  return static_cast<int>(value->get<std::int64_t>());
}

std::optional<double> JsonFields::number(std::string_view key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  DELTAIC_CHECK(value->is_number() && std::isfinite(value->get<double>()), full_name(key), " is ", show(*value),
                ", not a finite number");
  return value->get<double>();
}

std::optional<bool> JsonFields::boolean(std::string_view key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  DELTAIC_CHECK(value->is_boolean(), full_name(key), " is ", show(*value), ", not true or false");
  return value->get<bool>();
}

std::optional<std::string> JsonFields::text(std::string_view key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  DELTAIC_CHECK(value->is_string(), full_name(key), " is ", show(*value), ", not a string");
  return value->get<std::string>();
}

std::optional<JsonFields> JsonFields::object(std::string_view key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  DELTAIC_CHECK(value->is_object(), full_name(key), " is ", show(*value), ", not an object");
  return JsonFields(*value, full_name(key) + ".");
}

void JsonFields::refuse_objects(std::string_view what) const {
  for (const auto& [key, value] : object_->items())
    if (value.is_object())
      throw Unsupported(detail::concat(full_name(key), " is ", show(value), "; deltaic has ", what));
}

}  // namespace deltaic
