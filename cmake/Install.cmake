# Headers, library and package config, as the component "cpp" (the wheel installs the component "python").
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/deltaic)
install(TARGETS deltaic EXPORT deltaicTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
install(DIRECTORY cpp/include/deltaic DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp)
install(EXPORT deltaicTargets NAMESPACE deltaic:: DESTINATION ${config_dir} COMPONENT cpp)
configure_package_config_file(cmake/deltaicConfig.cmake.in deltaicConfig.cmake INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(deltaicConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/deltaicConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/deltaicConfigVersion.cmake
        DESTINATION ${config_dir} COMPONENT cpp)

# For builds without CMake. The library is static, so a user links what it needs too.
file(RELATIVE_PATH pkgconfig_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pkgconfig_to_prefix ${pkgconfig_to_prefix})
set(pkgconfig_cuda_libs)
if(DELTAIC_WITH_CUDA)
  set(pkgconfig_cuda_libs "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl")
endif()
configure_file(cmake/deltaic.pc.in deltaic.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/deltaic.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT cpp)
