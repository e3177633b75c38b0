// Loads every kernel of the QSA library on a device before its first use: a lazy load waits for kernels that are running,
// and an exchange's kernel may be waiting for a peer.
#include "device.h"
#include "qsa/attend.h"
#include "qsa/select.h"

#pragma GCC visibility push(default)
extern "C" const char* jaxcp_preload(int32_t device) {
  return jaxcp::loaded(device, [] {
    const cudaError_t error = jaxcp::qsa::load_attend();
    return error == cudaSuccess ? jaxcp::qsa::load_select() : error;
  });
}
#pragma GCC visibility pop
