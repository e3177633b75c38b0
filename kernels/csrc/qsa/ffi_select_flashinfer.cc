// XLA FFI handler of FlashInfer's top-k (platform "CUDA"); a library of its own, since it needs FlashInfer's headers.
//
// Operands:   scores f32 [..., rows, blocks], visible s32 [..., rows], zeros s32 [..., rows]
// Result:     ids s32 [..., rows, k]
#include "device.h"
#include "qsa/ffi.h"
#include "qsa/select_flashinfer.h"

namespace jaxcp::qsa {
namespace {

constexpr const char* kWhat = "FlashInfer top-k";

ffi::Error invalid(const std::string& why) { return invalid_argument(kWhat, why); }

ffi::Error topk(cudaStream_t stream, ffi::Buffer<ffi::F32> scores, Ints visible, Ints zeros, ffi::Result<Ints> ids) {
  const auto in = scores.dimensions(), out = ids->dimensions();
  const size_t rows = visible.element_count();
  if (in.size() < 2 || out.size() != in.size() || zeros.element_count() != rows) return invalid("wrong ranks");
  const auto blocks = static_cast<size_t>(in.back()), k = static_cast<size_t>(out.back());
  if (scores.element_count() != rows * blocks || ids->element_count() != rows * k)
    return invalid("shapes do not fit together");
  if (k < 1 || k > kMaxFlashInferK || blocks % 4 != 0 || rows * k > UINT32_MAX || blocks > INT32_MAX) {
    return invalid("k must be 1 ... 2048, blocks a multiple of 4, rows x k below 2^32");
  }
  if (rows == 0) return ffi::Error::Success();
  const FlashInferRows r{scores.typed_data(),     visible.typed_data(),        zeros.typed_data(),
                         ids->typed_data(),       static_cast<uint32_t>(rows), static_cast<uint32_t>(blocks),
                         static_cast<uint32_t>(k)};
  return launched(kWhat, launch_flashinfer_topk(r, stream));
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_qsa_flashinfer_topk, topk,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Ints>(),
                              {ffi::Traits::kCmdBufferCompatible});

// Loads every kernel on `device`.
extern "C" const char* jaxcp_preload(int32_t device) { return jaxcp::loaded(device, load_flashinfer_topk); }
#pragma GCC visibility pop

}  // namespace jaxcp::qsa
