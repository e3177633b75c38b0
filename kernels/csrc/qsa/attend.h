// Host interface of sparse attention; attend_params.h says how it works.
#pragma once

#include <cuda_runtime_api.h>

#include "attend_params.h"

namespace jaxcp::qsa {

// What is wrong with `params`, or null.
const char* problem(const AttendParams& params);

// 32-bit words of scratch that a call needs.
int64_t scratch_words(const AttendParams& params);

// Launches one call on the current device. `params` must have no problem().
cudaError_t launch_attend(const AttendParams& params, cudaStream_t stream);

// Loads every kernel on the current device.
cudaError_t load_attend();

// The steps of a call. launch_portable and launch_hopper take tiles with lists, the latter on compute capability 9.x;
// launch_rows takes rows without.
cudaError_t launch_lists(const AttendParams& params, const Slice& slice, cudaStream_t stream);
cudaError_t launch_portable(const AttendParams& params, const Slice& slice, cudaStream_t stream);
cudaError_t launch_hopper(const AttendParams& params, const Slice& slice, cudaStream_t stream);
cudaError_t launch_rows(const AttendParams& params, const Slice& slice, cudaStream_t stream);
cudaError_t launch_merge(const AttendParams& params, const Slice& slice, cudaStream_t stream);
cudaError_t load_lists();
cudaError_t load_portable();
cudaError_t load_hopper();
cudaError_t load_rows();

}  // namespace jaxcp::qsa
