// Loads every kernel of the QSA library on a device before its first use: a lazy load waits for kernels that are
// running, and an exchange's kernel may be waiting for a peer.
#include "device.h"
#include "qsa/attend.h"
#include "qsa/heads.h"
#include "qsa/select.h"
#include "qsa/store.h"

#pragma GCC visibility push(default)
extern "C" const char* jaxcp_preload(int32_t device) {
  return jaxcp::loaded(device, [] {
    using namespace jaxcp::qsa;
    for (const auto load : {load_prepare, load_store, load_attend, load_select}) {
      if (const cudaError_t error = load(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}
#pragma GCC visibility pop
