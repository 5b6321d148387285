/* Defines prefixd's version once: C, C++, CMake, the wheel and the packages read it here. */
#ifndef PREFIXD_VERSION_H_
#define PREFIXD_VERSION_H_

#define PREFIXD_VERSION_MAJOR 0
#define PREFIXD_VERSION_MINOR 2
#define PREFIXD_VERSION_PATCH 0
#define PREFIXD_VERSION "0.2.0"
/* Version of the shared libraries: before 1.0 a minor version may change the interface. */
#define PREFIXD_SOVERSION "0.2"

#endif /* PREFIXD_VERSION_H_ */
