#include "cpp/src/loader/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include <nlohmann/json.hpp>

#include "cpp/src/check.h"
#include "cpp/src/loader/json_fields.h"
#include "cpp/src/loader/mapped_file.h"

namespace deltaic {

namespace {

using nlohmann::json;

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLargestHeader = 100'000'000;

struct FileDType {
  std::size_t num_bytes;
  std::optional<DType> dtype;  // none: deltaic does not have it
};

std::optional<FileDType> file_dtype(const std::string& name) {
  static const std::map<std::string, FileDType> kDTypes{
      {"F64", {8, DType::f64}},      {"F32", {4, DType::f32}},       {"F16", {2, DType::f16}},
      {"BF16", {2, DType::bf16}},    {"I64", {8, DType::i64}},       {"I32", {4, DType::i32}},
      {"I8", {1, DType::i8}},        {"U8", {1, DType::u8}},         {"U64", {8, std::nullopt}},
      {"U32", {4, std::nullopt}},    {"I16", {2, std::nullopt}},     {"U16", {2, std::nullopt}},
      {"BOOL", {1, std::nullopt}},   {"F8_E4M3", {1, std::nullopt}}, {"F8_E5M2", {1, std::nullopt}},
      {"F8_E8M0", {1, std::nullopt}}};
  const auto found = kDTypes.find(name);
  return found == kDTypes.end() ? std::nullopt : std::optional(found->second);
}

// One entry of a header, checked but for overlaps.
struct Entry {
  std::string name;
  std::string dtype_name;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // inside the data
};

json parse_header(const std::string& file, std::string_view text) {
  try {
    json header = parse_json(text);
    DELTAIC_CHECK(header.is_object(), "not a JSON object but ", JsonFields::show(header));
    return header;
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(file + ": the header: " + error.what());
  }
}

std::uint64_t unsigned_integer(const json& value, const std::string& what) {
  DELTAIC_CHECK(value.is_number_unsigned(), what, " is ", JsonFields::show(value), ", not a non-negative integer");
  return value.get<std::uint64_t>();
}

// Bytes of `shape` with `element_bytes` each; nullopt when they exceed `most`.
std::optional<std::uint64_t> num_bytes(const std::vector<std::int64_t>& shape, std::size_t element_bytes,
                                       std::uint64_t most) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::uint64_t bytes = element_bytes;
  for (const std::int64_t size : shape) {
    if (static_cast<std::uint64_t>(size) > most / bytes) return std::nullopt;
    bytes *= static_cast<std::uint64_t>(size);
  }
  return bytes;
}

Entry read_entry(const std::string& file, const std::string& name, const json& fields, std::uint64_t data_bytes) {
  const std::string tensor = file + ": the tensor " + name;
  DELTAIC_CHECK(fields.is_object(), tensor, " is described by ", JsonFields::show(fields), ", not by an object");
  for (const char* key : {"dtype", "shape", "data_offsets"})
    DELTAIC_CHECK(fields.contains(key), tensor, " has no ", key);
  const json &dtype = fields["dtype"], &shape = fields["shape"], &offsets = fields["data_offsets"];
  DELTAIC_CHECK(dtype.is_string(), tensor, ": dtype is ", JsonFields::show(dtype), ", not a string");
  DELTAIC_CHECK(shape.is_array(), tensor, ": shape is ", JsonFields::show(shape), ", not a list");
  DELTAIC_CHECK(offsets.is_array() && offsets.size() == 2, tensor, ": data_offsets is ", JsonFields::show(offsets),
                ", not [begin, end]");

  Entry entry;
  entry.name = name;
  entry.dtype_name = dtype.get<std::string>();
  for (const json& size : shape) {
    const std::uint64_t value = unsigned_integer(size, tensor + ": a size of its shape");
    DELTAIC_CHECK(value <= INT64_MAX, tensor, ": shape ", JsonFields::show(shape), " is out of range");
    entry.shape.push_back(static_cast<std::int64_t>(value));
  }
  entry.begin = unsigned_integer(offsets[0], tensor + ": its begin offset");
  entry.end = unsigned_integer(offsets[1], tensor + ": its end offset");
  DELTAIC_CHECK(entry.begin <= entry.end, tensor, ": data_offsets ", JsonFields::show(offsets), " are reversed");
  DELTAIC_CHECK(entry.end <= data_bytes, tensor, ": data_offsets ", JsonFields::show(offsets), " reach past the ",
                data_bytes, " bytes of data in the file (is it truncated?)");
  if (const auto known = file_dtype(entry.dtype_name))
    DELTAIC_CHECK(num_bytes(entry.shape, known->num_bytes, data_bytes) == entry.end - entry.begin, tensor, ": ",
                  entry.end - entry.begin, " bytes do not hold ", entry.dtype_name, " ", JsonFields::show(shape));
  return entry;
}

std::vector<Entry> read_entries(const std::string& file, const json& header, std::uint64_t data_bytes) {
  std::vector<Entry> entries;
  for (const auto& [name, fields] : header.items())
    if (name != "__metadata__") entries.push_back(read_entry(file, name, fields, data_bytes));

  std::vector<const Entry*> by_offset;
  for (const Entry& entry : entries)
    if (entry.begin < entry.end) by_offset.push_back(&entry);
  std::sort(by_offset.begin(), by_offset.end(), [](const Entry* a, const Entry* b) { return a->begin < b->begin; });
  for (std::size_t i = 1; i < by_offset.size(); ++i) {
    const Entry &before = *by_offset[i - 1], &after = *by_offset[i];
    DELTAIC_CHECK(before.end <= after.begin, file, ": the tensors ", before.name, " [", before.begin, ", ", before.end,
                  ") and ", after.name, " [", after.begin, ", ", after.end, ") overlap");
  }
  return entries;
}

StoredTensor make_tensor(const Entry& entry, std::span<const std::byte> data,
                         const std::shared_ptr<const MappedFile>& mapping) {
  const auto known = file_dtype(entry.dtype_name);
  if (!known || !known->dtype) return {.view = {}, .owner = {}, .unreadable = "has dtype " + entry.dtype_name};
  if (entry.shape.size() > kMaxRank)
    return {.view = {}, .owner = {}, .unreadable = detail::concat("has rank ", entry.shape.size())};
  auto* address = const_cast<std::byte*>(data.data()) + entry.begin;  // views are not const-correct; nobody writes
  return {.view = make_view(address, *known->dtype, entry.shape), .owner = mapping, .unreadable = {}};
}

json read_index(const std::filesystem::path& index) {
  const MappedFile file(index);
  json document;
  try {
    document = parse_json({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()});
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(index.string() + ": " + error.what());
  }
  DELTAIC_CHECK(document.is_object() && document.contains("weight_map") && document["weight_map"].is_object(),
                index.string(), ": weight_map, an object of tensor name to file name, is missing");
  return std::move(document["weight_map"]);
}

}  // namespace

StoredTensors open_safetensors(const std::filesystem::path& path) {
  const auto mapping = std::make_shared<const MappedFile>(path);
  const std::span<const std::byte> bytes = mapping->bytes();
  const std::string file = path.string();
  DELTAIC_CHECK(bytes.size() >= kLengthBytes, file, " has ", bytes.size(),
                " bytes, too few for the header length of a safetensors file");
  std::uint64_t header_bytes = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) header_bytes |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  DELTAIC_CHECK(header_bytes <= kLargestHeader, file, ": the header length is ", header_bytes, ", above ",
                kLargestHeader, ": this is not a safetensors file");
  DELTAIC_CHECK(header_bytes <= bytes.size() - kLengthBytes, file, ": the header is ", header_bytes,
                " bytes long, but only ", bytes.size() - kLengthBytes,
                " bytes follow its length: the file is truncated");
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  const json header = parse_header(file, {text, static_cast<std::size_t>(header_bytes)});
  const std::span<const std::byte> data = bytes.subspan(kLengthBytes + header_bytes);

  StoredTensors tensors;
  for (const Entry& entry : read_entries(file, header, data.size()))
    tensors.emplace(entry.name, make_tensor(entry, data, mapping));
  return tensors;
}

StoredTensors open_safetensors_index(const std::filesystem::path& index) {
  std::map<std::string, StoredTensors> shards;
  StoredTensors tensors;
  const json weight_map = read_index(index);
  for (const auto& [name, value] : weight_map.items()) {
    DELTAIC_CHECK(value.is_string(), index.string(), ": the file of the tensor ", name, " is ", JsonFields::show(value),
                  ", not a string");
    const auto file_name = value.get<std::string>();
    const std::filesystem::path relative(file_name);
    DELTAIC_CHECK(!file_name.empty() && relative.filename() == relative && file_name != "." && file_name != "..",
                  index.string(), ": the file of the tensor ", name, " is \"", file_name,
                  "\", not a file name inside the folder");
    const auto path = index.parent_path() / relative;
    if (!shards.contains(file_name)) {
      std::error_code ignored;  // opening it tells the reason
      DELTAIC_CHECK(std::filesystem::exists(path, ignored), path.string(), " is missing: ", index.filename().string(),
                    " lists it, for the tensor ", name, " among others");
      shards.emplace(file_name, open_safetensors(path));
    }
    const StoredTensors& shard = shards.at(file_name);
    const auto found = shard.find(name);
    DELTAIC_CHECK(found != shard.end(), path.string(), " does not hold the tensor ", name, ", which ",
                  index.filename().string(), " says it has");
    tensors.emplace(name, found->second);
  }
  return tensors;
}

}  // namespace deltaic
