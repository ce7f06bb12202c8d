#include "cpp/src/loader/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>

#include "cpp/src/check.h"

namespace deltaic {

namespace {

struct FileDescriptor {
  int value;
  ~FileDescriptor() {
    if (value >= 0) ::close(value);
  }
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  // Without O_NONBLOCK, opening a named pipe waits for a writer.
  const FileDescriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  DELTAIC_CHECK(file.value >= 0, path.string(), " cannot be opened: ", std::strerror(errno));
  struct stat status{};
  DELTAIC_CHECK(::fstat(file.value, &status) == 0, path.string(), " cannot be read: ", std::strerror(errno));
  DELTAIC_CHECK(S_ISREG(status.st_mode), path.string(), " is not a regular file");
  num_bytes_ = static_cast<std::size_t>(status.st_size);
  if (num_bytes_ == 0) return;  // an empty mapping is an error of mmap
  void* mapping = ::mmap(nullptr, num_bytes_, PROT_READ, MAP_PRIVATE, file.value, 0);
  DELTAIC_CHECK(mapping != MAP_FAILED, path.string(), " cannot be mapped: ", std::strerror(errno));
  data_ = static_cast<const std::byte*>(mapping);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), num_bytes_);
}

}  // namespace deltaic
