// XLA FFI handler of FlashInfer's exchange kernel (platform "CUDA").
//
// Operands:   o [rows, cp, dim], lse [rows, cp] f32, token u32 (read by nobody: it orders calls)
// Results:    out [rows, dim], token u32
// Attributes: exchange, site, base
#include <cuda_runtime_api.h>

#include "ffi_exchange.h"
#include "ffi_stream.h"
#include "flashinfer.h"

namespace jaxcp {
namespace {

ffi::Error flashinfer(cudaStream_t stream, ffi::AnyBuffer o, ffi::Buffer<ffi::F32> lse,
                      ffi::Buffer<ffi::U32>, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::U32>>,
                      int64_t exchange, int64_t, int64_t base) {
  const int device = current_device();
  const auto workspaces = Registry::instance().on_device(exchange, device);
  if (workspaces.empty()) return not_made(exchange, device);
  Workspace& workspace = *workspaces.front();
  if (ffi::Error error = ordered(workspace, stream); error.failure()) return error;
  const Config& config = workspace.config;
  const auto in = o.dimensions(), result = out->dimensions();
  FlashInferParams p{};
  p.dtype = static_cast<Dtype>(config.dtype);
  if (in.size() != 3 || in[1] != config.cp || in[2] != config.head_dim || !same_dtype(o.element_type(), p.dtype)) {
    return invalid("o must be [rows, cp, dim] of the exchange's dtype");
  }
  if (lse.element_count() != static_cast<size_t>(in[0] * in[1])) return invalid("lse must be [rows, cp]");
  if (result.size() != 2 || result[0] != in[0] || result[1] != in[2]) return invalid("out must be [rows, dim]");
  p.o = o.untyped_data();
  p.lse = lse.typed_data();
  p.out = out->untyped_data();
  p.workspace = workspace.block();
  p.rank = config.rank;
  p.cp = config.cp;
  p.rows = static_cast<int32_t>(in[0]);
  p.capacity = config.max_tokens * config.heads_per_rank();
  p.dim = config.head_dim;
  p.base = static_cast<Base>(base);
  const FlashInferLayout layout{p.cp, p.capacity, p.dim * 2};
  p.workspaces = reinterpret_cast<std::uint8_t* const*>(workspace.block() + flashinfer_table(layout));
  if (const char* why = problem(p)) return invalid(why);
  ++workspace.launches;
  return launched(launch_flashinfer(p, 0, stream));
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_flashinfer, flashinfer,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::U32>>()
                                  .Attr<int64_t>("exchange")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("base"),
                              {ffi::Traits::kCmdBufferCompatible});

// Loads every kernel on `device`.
extern "C" const char* jaxcp_preload(int32_t device) { return loaded(device, load_flashinfer); }
#pragma GCC visibility pop

}  // namespace jaxcp
