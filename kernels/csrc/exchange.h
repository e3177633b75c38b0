// Host interface of the fused exchange kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol.h"

namespace jaxcp {

// Loads every variant of the kernel on the current device. Call once per device before any rank launches: a lazy load
// while a peer spins is a deadlock.
cudaError_t load_exchange();

// Launches one call of one rank on the current device; nothing else happens on the host. `params` must satisfy
// problem().
cudaError_t launch_exchange(const ExchangeParams& params, cudaStream_t stream);

// Blocks that the current device holds at once of the variant for `params`, and blocks that a call of it can use.
// Ranks simulated on one device share the former through grid_cap.
cudaError_t resident_blocks(const ExchangeParams& params, int* blocks);
int useful_blocks(const ExchangeParams& params);

// Makes the workspace of one rank blank, in stream order. No peer may be in a call.
cudaError_t blank_workspace(uint8_t* workspace, const Layout& layout, cudaStream_t stream);

}  // namespace jaxcp
