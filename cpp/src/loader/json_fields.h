#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace deltaic {

// Parses a JSON text. Throws InvalidArgument for text that is not JSON, a key that appears twice in its object, and
// nesting deeper than any file of a checkpoint has.
nlohmann::json parse_json(std::string_view text);

// Reads the fields of one JSON object with checks. A null is an absent field. Every reader throws InvalidArgument
// naming the field, what it holds and what it may hold.
class JsonFields {
 public:
  // `prefix` stands before field names in messages: "text_config.", or nothing. `object` must outlive this.
  JsonFields(const nlohmann::json& object, std::string prefix) : object_(&object), prefix_(std::move(prefix)) {}

  const nlohmann::json* find(std::string_view key) const;  // nullptr: absent or null
  bool has(std::string_view key) const { return find(key) != nullptr; }
  std::string full_name(std::string_view key) const { return prefix_ + std::string(key); }

  std::optional<int> integer(std::string_view key, std::int64_t smallest, std::int64_t largest) const;
  std::optional<double> number(std::string_view key) const;  // finite
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> text(std::string_view key) const;
  std::optional<JsonFields> object(std::string_view key) const;
  // Throws Unsupported naming the first member that is itself an object. `what`: what deltaic has instead.
  void refuse_objects(std::string_view what) const;
  // A value for messages: its JSON text, cut when long.
  static std::string show(const nlohmann::json& value);

 private:
  const nlohmann::json* object_;
  std::string prefix_;
};

}  // namespace deltaic
