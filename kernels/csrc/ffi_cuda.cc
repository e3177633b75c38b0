// XLA FFI handler of the fused exchange (platform "CUDA").
//
// XLA calls it to launch, or to capture a launch into a command buffer; replays do not come here. So nothing that a call
// needs may be computed on the host per call: the call number is in device memory, and addresses never change.
#include <cuda_runtime_api.h>

#include "exchange.h"
#include "ffi_exchange.h"
#include "ffi_stream.h"

namespace jaxcp {
namespace {

ffi::Error fused(cudaStream_t stream, ffi::RunId run, ffi::AnyBuffer o, ffi::Buffer<ffi::F32> lse,
                 ffi::Buffer<ffi::U32>, ffi::Buffer<ffi::U32> place, ffi::Result<ffi::AnyBuffer> out,
                 ffi::Result<ffi::Buffer<ffi::U32>>, ffi::RemainingRets more, int64_t exchange, int64_t site, int64_t base,
                 Axes axes) {
  const int device = current_device();
  Registry& registry = Registry::instance();
  if (const auto why = registry.refusal(exchange, run.run_id)) return ffi::Error::Internal(*why);
  const auto workspaces = registry.on_device(exchange, device);
  if (workspaces.empty()) return not_made(exchange, device);
  Workspace& workspace = *workspaces.front();
  if (ffi::Error error = ordered(workspace, stream); error.failure()) return error;
  ExchangeParams params = workspace.params(site);
  params.place = place.typed_data();
  params.own_place = place_along(workspace.config, axes);
  if (ffi::Error error = take_buffers(workspace.config, o, lse, out, more, base, params); error.failure()) return error;
  ++workspace.launches;
  return launched(launch_exchange(params, stream));
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_fused, fused,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::U32>>()
                                  .RemainingRets()
                                  .Attr<int64_t>("exchange")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("base")
                                  .Attr<Axes>("axes"),
                              {ffi::Traits::kCmdBufferCompatible});

// Loads every kernel on `device`.
extern "C" const char* jaxcp_preload(int32_t device) { return loaded(device, load_exchange); }
#pragma GCC visibility pop

}  // namespace jaxcp
