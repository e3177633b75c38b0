// Stands before NCCL's header of this name on the include path when FlashInfer's kernel is compiled.
//
// That kernel takes two names from NCCL's device API: the type of a window, and the address of an offset in a peer's
// part of it. Here a window is a device array of the ranks' workspace addresses, so the kernel runs over the peer
// access of our own workspaces and needs neither NCCL nor torch.
#pragma once

#include <cstddef>

using ncclWindow_t = char* const*;

__device__ __forceinline__ void* ncclGetLsaPointer(ncclWindow_t window, size_t offset, int peer) {
  return window[peer] + offset;
}
