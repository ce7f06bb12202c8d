#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

namespace deltaic {

// A whole file, mapped read-only for as long as the object lives.
class MappedFile {
 public:
  // Throws InvalidArgument with the path and the reason when the file cannot be opened or mapped.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, num_bytes_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

}  // namespace deltaic
