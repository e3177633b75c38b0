// Functions that are written once for the GPU and the host.
#pragma once

#ifdef __CUDACC__
#define JAXCP_BOTH __host__ __device__ __forceinline__
#else
#define JAXCP_BOTH inline
#endif
