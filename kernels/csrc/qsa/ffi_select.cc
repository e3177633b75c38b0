// XLA FFI handler of block selection (platform "CUDA"); see select.h. Launches only: it can be captured and replayed.
//
// Operands:   index_q bf16 [rows, heads, dim]; index keys [layers, pages, page_blocks, dim], bf16 or e4m3 bits (u8);
//             layer s32; page_table s32 [requests, request_pages]; request, position s32 [rows]
// Results:    ids s32 [rows, k]; scratch u8 [bytes]
// Attributes: ratio, blocks (bound of a row's visible ones), longest (bound of a request's neighbouring rows),
//             method (0 stored scores, 1 streaming)
#include "qsa/ffi.h"
#include "qsa/select.h"

namespace jaxcp::qsa {
namespace {

constexpr const char* kWhat = "QSA selection";

ffi::Error invalid(const std::string& why) { return invalid_argument(kWhat, why); }

ffi::Error select(cudaStream_t stream, ffi::Buffer<ffi::BF16> index_q, ffi::AnyBuffer pool, Ints layer, Ints page_table,
                  Ints request, Ints position, ffi::Result<Ints> ids, ffi::Result<ffi::Buffer<ffi::U8>> scratch,
                  int64_t ratio, int64_t blocks, int64_t longest, int64_t method) {
  const auto q = index_q.dimensions(), keys = pool.dimensions(), table = page_table.dimensions(),
             out = ids->dimensions();
  if (q.size() != 3 || keys.size() != 4 || table.size() != 2 || out.size() != 2) return invalid("wrong ranks");
  const auto rows = static_cast<size_t>(q[0]);
  if (keys[3] != q[2] || out[0] != q[0] || request.element_count() != rows || position.element_count() != rows ||
      layer.element_count() != 1) {
    return invalid("shapes do not fit together");
  }
  const bool e4m3 = pool.element_type() == ffi::DataType::U8;
  if (!e4m3 && pool.element_type() != ffi::DataType::BF16)
    return invalid("index keys must be bf16, or u8 holding e4m3");
  SelectParams p{};
  p.index_q = index_q.untyped_data(), p.pool = pool.untyped_data(), p.layer = layer.typed_data();
  p.page_table = page_table.typed_data(), p.request = request.typed_data(), p.position = position.typed_data();
  p.ids = ids->typed_data(), p.scratch = scratch->untyped_data(),
  p.scratch_bytes = static_cast<int64_t>(scratch->size_bytes());
  const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
  p.rows = narrow(q[0]), p.heads = narrow(q[1]), p.dim = narrow(q[2]), p.k = narrow(out[1]);
  p.layers = narrow(keys[0]), p.pages = narrow(keys[1]), p.page_blocks = narrow(keys[2]);
  p.requests = narrow(table[0]), p.request_pages = narrow(table[1]);
  p.ratio = narrow(ratio), p.blocks = narrow(blocks), p.longest = narrow(longest);
  p.e4m3 = e4m3, p.method = static_cast<Method>(method);
  if (const char* why = problem(p)) return invalid(why);
  return launched(kWhat, launch_select(p, stream));
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_qsa_select, select,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Ints>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Attr<int64_t>("ratio")
                                  .Attr<int64_t>("blocks")
                                  .Attr<int64_t>("longest")
                                  .Attr<int64_t>("method"),
                              {ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop

}  // namespace jaxcp::qsa
