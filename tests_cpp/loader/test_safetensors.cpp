#include <random>
#include <string>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>
#include <sys/stat.h>

#include "cpp/src/loader/safetensors.h"
#include "tests_cpp/support/temp_dir.h"

using namespace deltaic;

namespace {

// The bytes of a safetensors file.
std::string file_bytes(const std::string& header, std::size_t num_data_bytes) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  bytes += header;
  for (std::size_t i = 0; i < num_data_bytes; ++i) bytes.push_back(static_cast<char>(i));
  return bytes;
}

std::string error_of(const std::filesystem::path& file) {
  try {
    open_safetensors(file);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("tensors of every dtype are views into the file") {
  const test::TempDir dir;
  const auto file = dir.write("a.safetensors", file_bytes(R"({"__metadata__": {"format": "pt"},
    "a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [2, 1], "data_offsets": [8, 16]},
    "c": {"dtype": "F16", "shape": [2], "data_offsets": [16, 20]},
    "d": {"dtype": "BF16", "shape": [2], "data_offsets": [20, 24]},
    "e": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
    "f": {"dtype": "I32", "shape": [1], "data_offsets": [32, 36]},
    "g": {"dtype": "I8", "shape": [1], "data_offsets": [36, 37]},
    "h": {"dtype": "U8", "shape": [3], "data_offsets": [37, 40]},
    "i": {"dtype": "F32", "shape": [0, 7], "data_offsets": [40, 40]}})",
                                                          40));
  StoredTensors tensors = open_safetensors(file);
  REQUIRE(tensors.size() == 9);
  const DType dtypes[] = {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i64,
                          DType::i32, DType::i8,  DType::u8,  DType::f32};
  int i = 0;
  for (const auto& [name, tensor] : tensors) {
    CAPTURE(name);
    CHECK(tensor.view.dtype == dtypes[i++]);
    CHECK(tensor.unreadable.empty());
  }
  CHECK(tensors.at("b").view.rank == 2);
  CHECK(tensors.at("b").view.shape[0] == 2);
  CHECK(tensors.at("e").view.rank == 0);
  CHECK(tensors.at("i").view.numel() == 0);
  CHECK(static_cast<const char*>(tensors.at("h").view.data)[2] == 39);

  // One tensor alone keeps the mapping alive.
  const StoredTensor last = tensors.at("h");
  tensors.clear();
  std::filesystem::remove(file);
  CHECK(static_cast<const char*>(last.view.data)[0] == 37);
}

TEST_CASE("a tensor of a dtype or rank that deltaic has not is listed as unreadable") {
  const test::TempDir dir;
  const auto file = dir.write("a.safetensors", file_bytes(R"({
    "fp8": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
    "new": {"dtype": "Q7", "shape": [4], "data_offsets": [4, 9]},
    "deep": {"dtype": "U8", "shape": [1, 1, 1, 1, 1, 1, 1], "data_offsets": [9, 10]}})",
                                                          10));
  const StoredTensors tensors = open_safetensors(file);
  CHECK(tensors.at("fp8").unreadable == "has dtype F8_E4M3");
  CHECK(tensors.at("new").unreadable == "has dtype Q7");
  CHECK(tensors.at("deep").unreadable == "has rank 7");
}

TEST_CASE("a bad file is refused with its name and what is wrong") {
  struct Case {
    std::string bytes;
    const char* message;
  };
  const std::string one = R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})";
  const std::string good = file_bytes(one, 8);
  const auto entry = [](const char* fields) { return file_bytes(std::string(R"({"a": )") + fields + "}", 8); };
  for (const auto& [bytes, message] : {
           Case{"", "has 0 bytes, too few for the header length"},
           Case{"1234567", "has 7 bytes, too few for the header length"},
           Case{std::string(8, '\xff'), "the header length is 18446744073709551615, above 100000000"},
           Case{std::string("\x01\xe1\xf5\x05\0\0\0\0", 8), "the header length is 100000001, above 100000000"},
           Case{std::string("\x40\0\0\0\0\0\0\0{}", 10), "the header is 64 bytes long, but only 2 bytes follow"},
           Case{file_bytes("", 0), "the header: not valid JSON"},
           Case{file_bytes("{\"a\": ", 8), "the header: not valid JSON"},
           Case{file_bytes("\x80\x81", 8), "the header: not valid JSON"},
           Case{file_bytes("[1]", 8), "the header: not a JSON object but [1]"},
           Case{file_bytes(std::string(100, '[') + std::string(100, ']'), 0),
                "the header: nested deeper than 64 levels"},
           Case{good.substr(0, good.size() - 1),
                "the tensor a: data_offsets [0,8] reach past the 7 bytes of data in the file (is it truncated?)"},
           Case{file_bytes(R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                              "a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}})",
                           2),
                "the header: a is listed twice"},
           Case{file_bytes(R"({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
                              "b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}})",
                           4),
                "the tensors a [0, 3) and b [2, 4) overlap"},
           Case{file_bytes(R"({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                              "b": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})",
                           4),
                "overlap"},
           Case{entry(R"(3)"), "the tensor a is described by 3, not by an object"},
           Case{entry(R"({"shape": [2], "data_offsets": [0, 8]})"), "the tensor a has no dtype"},
           Case{entry(R"({"dtype": "F32", "data_offsets": [0, 8]})"), "the tensor a has no shape"},
           Case{entry(R"({"dtype": "F32", "shape": [2]})"), "the tensor a has no data_offsets"},
           Case{entry(R"({"dtype": 1, "shape": [2], "data_offsets": [0, 8]})"), "dtype is 1, not a string"},
           Case{entry(R"({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]})"), "shape is 2, not a list"},
           Case{entry(R"({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]})"),
                "is -2, not a non-negative integer"},
           Case{entry(R"({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]})"), "is 2.0, not a non-negative"},
           Case{entry(R"({"dtype": "F32", "shape": [18446744073709551615], "data_offsets": [0, 8]})"), "out of range"},
           Case{entry(R"({"dtype": "F32", "shape": [2], "data_offsets": [0]})"), "not [begin, end]"},
           Case{entry(R"({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]})"), "begin offset is -8"},
           Case{entry(R"({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]})"), "data_offsets [8,0] are reversed"},
           Case{entry(R"({"dtype": "F32", "shape": [2], "data_offsets": [0, 9223372036854775807]})"), "reach past"},
           Case{entry(R"({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]})"),
                "the tensor a: 8 bytes do not hold F32 [3]"},
           Case{entry(R"({"dtype": "BF16", "shape": [2], "data_offsets": [0, 8]})"),
                "the tensor a: 8 bytes do not hold BF16 [2]"},
           Case{entry(R"({"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]})"), "do not hold"},
       }) {
    CAPTURE(message);
    const test::TempDir dir;
    const auto file = dir.write("bad.safetensors", bytes);
    const std::string error = error_of(file);
    CHECK_MESSAGE(error.find(message) != std::string::npos, "got: " << error);
    CHECK(error.find(file.string()) == 0);
  }
}

TEST_CASE("a file that is missing, or a folder, is refused by name") {
  const test::TempDir dir;
  const auto missing = dir.path() / "none.safetensors";
  CHECK(error_of(missing) == missing.string() + " cannot be opened: No such file or directory");
  CHECK(error_of(dir.path()) == dir.path().string() + " is not a regular file");
  const std::filesystem::path pipe = dir.path() / "pipe.safetensors";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(error_of(pipe) == pipe.string() + " is not a regular file");
}

TEST_CASE("shards are opened by their index") {
  const test::TempDir dir;
  dir.write("x.safetensors", file_bytes(R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                                            "unlisted": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}})",
                                        2));
  dir.write("y.safetensors", file_bytes(R"({"b": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})", 2));
  const auto index = dir.write("model.safetensors.index.json",
                               R"({"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}})");
  const StoredTensors tensors = open_safetensors_index(index);
  CHECK(tensors.size() == 2);
  CHECK(tensors.at("b").view.shape[0] == 2);
}

TEST_CASE("a bad index is refused with the tensor and the shard") {
  struct Case {
    const char* index;
    const char* message;
  };
  for (const auto& [index, message] : {
           Case{"nothing", "not valid JSON"},
           Case{R"({"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}})", "a is listed twice"},
           Case{"{}", "weight_map, an object of tensor name to file name, is missing"},
           Case{R"({"weight_map": {"a": 1}})", "the file of the tensor a is 1, not a string"},
           Case{R"({"weight_map": {"a": "../x.safetensors"}})", "\"../x.safetensors\", not a file name inside"},
           Case{R"({"weight_map": {"a": ".."}})", "\"..\", not a file name inside"},
           Case{R"({"weight_map": {"a": "/x.safetensors"}})", "not a file name inside"},
           Case{R"({"weight_map": {"a": ""}})", "not a file name inside"},
           Case{R"({"weight_map": {"a": "x.safetensors", "b": "z.safetensors"}})",
                "z.safetensors is missing: model.safetensors.index.json lists it, for the tensor b among others"},
           Case{R"({"weight_map": {"c": "x.safetensors"}})",
                "x.safetensors does not hold the tensor c, which model.safetensors.index.json says it has"},
       }) {
    CAPTURE(index);
    const test::TempDir dir;
    dir.write("x.safetensors", file_bytes(R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})", 1));
    const auto path = dir.write("model.safetensors.index.json", index);
    std::string error;
    try {
      open_safetensors_index(path);
    } catch (const InvalidArgument& caught) {
      error = caught.what();
    }
    CHECK_MESSAGE(error.find(message) != std::string::npos, "got: " << error);
  }
}

TEST_CASE("a damaged file gives an error or views inside the file, never anything else") {
  const std::string good = file_bytes(R"({"__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [8, 16]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [16, 17]}})",
                                      17);
  const std::string replacements = R"(0123456789-.,:[]{}"\eE)";
  const test::TempDir dir;
  std::mt19937 random(1);
  int num_errors = 0;
  for (int round = 0; round < 2000; ++round) {
    CAPTURE(round);
    std::string bytes = good;
    for (unsigned i = 0; i < 1 + random() % 3; ++i) {
      const std::size_t at = random() % bytes.size();
      bytes[at] = random() % 2 == 0 ? replacements[random() % replacements.size()] : static_cast<char>(random());
    }
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    const auto file = dir.write("damaged.safetensors", bytes);
    try {
      unsigned sum = 0;
      for (const auto& [name, tensor] : open_safetensors(file))
        for (std::size_t i = 0; i < (tensor.unreadable.empty() ? tensor.view.num_bytes() : 0); ++i)
          sum += static_cast<const unsigned char*>(tensor.view.data)[i];
      CHECK(sum <= 255 * good.size());
    } catch (const InvalidArgument& error) {
      CHECK(std::string(error.what()).find(file.string()) == 0);
      ++num_errors;
    }
  }
  CHECK(num_errors > 500);
}
