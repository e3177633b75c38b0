// Products by warpgroup MMA (Hopper): queries in registers, keys in shared memory, 128-byte swizzle.
//
// A warp's quarter of the 64 rows of a product has the layout of an m16n8k16 product of its own, in queries and in sums, so
// all else is as select_score.cuh says. 64 keys are one step; column 8 j + n is key 16 (n / 2) + 2 j + n % 2, which gives
// each thread 16 neighbouring keys. Keys lie a line of 64 dims each, dims 64 ... 127 behind those of all keys.
#pragma once

#include "qsa/attend_hopper.cuh"

namespace jaxcp::qsa::hopper {

constexpr int kHalfBytes = 64 * 128;  // 64 dims of 64 keys

// Where 16 bytes of a key lie, and how far from there those of a key that is an even number further on among 16.
__device__ __forceinline__ uint32_t key_unit(int key, int unit) {
  const int line = key % 16 / 2 * 8 + key / 16 * 2 + key % 2;
  return unit / 8 * kHalfBytes + line * 128 + ((unit ^ line) % 8) * 16;
}

__host__ __device__ constexpr int offset_after(int more) { return more / 2 * 1024; }

// d [64, 64] = a [64, 16] b [64, 16]^T, or +=: a in registers, b 16 dims of 64 keys.
__device__ __forceinline__ void multiply_keys(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %37, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, "
      "%35}, %36, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<uint32_t>(add)));
}

// Whether a condition holds in any thread of this thread's warpgroup; they meet here.
__device__ __forceinline__ bool any_of_warpgroup(bool condition) {
  uint32_t any;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n barrier.cta.red.or.pred q, %2, 128, p;\n selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(condition)), "r"(threadIdx.x / 128 + 1)
      : "memory");
  return any != 0;
}

}  // namespace jaxcp::qsa::hopper
