// The few memory accesses of the exchange kernel, each one instruction, with the reason for its strength.
#pragma once

#include <cstdint>

namespace jaxcp::device {

// Input that no one writes during the kernel.
__device__ __forceinline__ uint4 load_input(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// As one predicated instruction: around a branch, the compiler would merge such loads into one with an indexed
// destination, and so put the whole array into local memory.
__device__ __forceinline__ void load_input_if(bool wanted, uint4& v, const void* address) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
      " @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(address), "r"(static_cast<uint32_t>(wanted)));
}

// Words of a workspace: strong at system scope, because another device reads or writes them while we do; relaxed,
// because each word carries its own readiness (protocol.h, TRANSPORT) and nothing else hangs on it.
__device__ __forceinline__ uint4 load_system(const void* address) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_system(void* address, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint32_t load_system_word(const void* address) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_system_word(void* address, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_system_long(void* address, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

// Words of Control: this device's blocks only.
__device__ __forceinline__ uint64_t add_device(uint64_t* address, uint64_t n) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(n) : "memory");
  return old;
}
__device__ __forceinline__ uint32_t swap_device(uint32_t* address, uint32_t v) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(v) : "memory");
  return old;
}
__device__ __forceinline__ uint64_t load_device_long(const uint64_t* address) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_device_word(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

}  // namespace jaxcp::device
