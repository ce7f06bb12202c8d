#pragma once

#include <stdexcept>
#include <string>

namespace deltaic {

// Everything deltaic throws derives from Error. What is expected to happen (no free block, end of text) is a
// value, never an exception.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's mistake: a ValueError in Python.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// What deltaic cannot do (yet, or in this build): a NotImplementedError in Python.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// Host or device memory ran out: a MemoryError in Python. The message has the numbers and the remedy.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// The device or its driver failed: a RuntimeError in Python.
class DeviceError : public Error {
 public:
  using Error::Error;
};

}  // namespace deltaic
