// XLA FFI handler of sparse attention (platform "CUDA").
//
// Operands:   q bf16 [rows, heads, dim], blocks i32 [rows, width], request i32 [rows], position i32 [rows],
//             page_table i32 [requests, table_width], k, v bf16 [layers, pages, page_size, kv_heads, dim], layer i32 []
// Results:    o bf16 [rows, heads, dim], lse f32 [rows, heads], scratch i32 [words]
// Attributes: ratio, tile_rows, splits, slice (attend.h), scale_log2e
#include <string>

#include "attend.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcp::qsa {
namespace {

namespace ffi = xla::ffi;
using Ints = ffi::Buffer<ffi::S32>;
using Halves = ffi::Buffer<ffi::BF16>;

ffi::Error invalid(const std::string& why) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jaxcp sparse attention: " + why);
}

ffi::Error attend(cudaStream_t stream, Halves q, Ints blocks, Ints request, Ints position, Ints page_table, Halves k,
                  Halves v, Ints layer, ffi::Result<Halves> o, ffi::Result<ffi::Buffer<ffi::F32>> lse,
                  ffi::Result<Ints> scratch, int64_t ratio, int64_t tile_rows, int64_t splits, int64_t slice,
                  float scale_log2e) {
  const auto shape = q.dimensions(), pool = k.dimensions(), ids = blocks.dimensions(), table = page_table.dimensions();
  if (shape.size() != 3 || ids.size() != 2 || ids[0] != shape[0])
    return invalid("blocks must be [rows, width] of q's rows");
  if (request.element_count() != static_cast<size_t>(shape[0]) || position.element_count() != request.element_count()) {
    return invalid("request and position must have a number per row of q");
  }
  if (pool.size() != 5 || v.dimensions() != pool || pool[4] != shape[2]) {
    return invalid("k and v must be [layers, pages, page_size, kv_heads, dim] of q's dim");
  }
  if (table.size() != 2 || layer.element_count() != 1) return invalid("page_table must be 2-d, layer one number");
  if (o->dimensions() != shape || lse->element_count() != static_cast<size_t>(shape[0] * shape[1])) {
    return invalid("o must be like q, lse [rows, heads]");
  }
  AttendParams p{};
  p.q = q.untyped_data(), p.k = k.untyped_data(), p.v = v.untyped_data(), p.o = o->untyped_data();
  p.blocks = blocks.typed_data(), p.request = request.typed_data(), p.position = position.typed_data();
  p.page_table = page_table.typed_data(), p.layer = layer.typed_data();
  p.lse = lse->typed_data(), p.scratch = scratch->typed_data();
  p.scratch_size = static_cast<int64_t>(scratch->element_count());
  p.rows = shape[0], p.heads = static_cast<int32_t>(shape[1]), p.dim = static_cast<int32_t>(shape[2]);
  p.layers = pool[0], p.pages = pool[1];
  p.page_size = static_cast<int32_t>(pool[2]), p.kv_heads = static_cast<int32_t>(pool[3]);
  p.width = static_cast<int32_t>(ids[1]);
  p.requests = static_cast<int32_t>(table[0]), p.table_width = static_cast<int32_t>(table[1]);
  p.ratio = static_cast<int32_t>(ratio), p.tile_rows = static_cast<int32_t>(tile_rows);
  p.splits = static_cast<int32_t>(splits), p.slice = slice, p.scale_log2e = scale_log2e;
  if (const char* why = problem(p)) return invalid(why);
  const cudaError_t error = launch_attend(p, stream);
  return error == cudaSuccess
             ? ffi::Error::Success()
             : ffi::Error::Internal(std::string("jaxcp sparse attention: launch: ") + cudaGetErrorString(error));
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_qsa_attend, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Halves>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Ints>()
                                  .Ret<Halves>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<Ints>()
                                  .Attr<int64_t>("ratio")
                                  .Attr<int64_t>("tile_rows")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("slice")
                                  .Attr<float>("scale_log2e"),
                              {ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop

}  // namespace jaxcp::qsa
