#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "python/bindings/module.h"

// Binds a plain struct: each field readable and writable, and a constructor that takes fields by keyword and refuses a
// name that does not exist. Containers are copied when read, so set them whole.
template <class T>
class Struct {
 public:
  Struct(py::module_& m, const char* name, const char* doc) : class_(m, name, doc) {
    class_.def(py::init([](const py::kwargs& fields) {
      T value{};
      py::object self = py::cast(&value, py::return_value_policy::reference);
      for (const auto& [key, field] : fields) {
        if (!py::hasattr(self, key)) {
          const std::string message = py::str("{} has no field {!r}").format(py::type::of<T>().attr("__name__"), key);
          throw py::type_error(message);
        }
        py::setattr(self, key, field);
      }
      return value;
    }));
  }

  template <class Field>
  Struct& field(const char* name, Field T::* member) {
    // A struct in a field is read in place; what a container holds is copied, so that it outlives the container.
    constexpr bool is_struct = std::is_base_of_v<py::detail::type_caster_generic, py::detail::make_caster<Field>>;
    const auto policy = is_struct ? py::return_value_policy::reference_internal : py::return_value_policy::copy;
    class_.def_property(
        name, py::cpp_function([member](const T& self) -> const Field& { return self.*member; }, policy),
        py::cpp_function([member](T& self, Field value) { self.*member = std::move(value); }, py::is_method(class_)));
    return *this;
  }

  py::class_<T>& class_object() { return class_; }

 private:
  py::class_<T> class_;
};
