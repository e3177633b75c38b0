// Which sources, compiler, jaxlib and architectures a library was built from; Python refuses one that is not the expected.
#pragma GCC visibility push(default)
extern "C" const char* jaxcp_build_key() { return JAXCP_BUILD_KEY; }
#pragma GCC visibility pop
