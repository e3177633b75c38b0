// XLA FFI handlers of sparse attention (platform "CUDA"); see attend.h. They launch only: calls can be captured.
//
// Both:       blocks i32 [rows, width], request i32 [rows], position i32 [rows], page_table i32 [requests,
// table_width],
//             k, v bf16 [layers, pages, page_size, kv_heads, dim], layer i32 []
//             attributes ratio, tile_rows, splits, slice (attend.h), scale_log2e
// attend:     q bf16 [rows, heads, dim] before these; results o like q, lse f32 [rows, heads], scratch i32 [words]
// mix:        q_gate bf16 [rows, heads * 2 * dim], norm bf16 [dim], cos, sin f32 [rows, pairs] before these; results
//             gated o bf16 [rows, heads * dim], scratch i32 [words]; another attribute: eps
#include "attend.h"
#include "ffi.h"

namespace jaxcp::qsa {
namespace {

constexpr const char* kWhat = "sparse attention";

ffi::Error invalid(const std::string& why) { return invalid_argument(kWhat, why); }

// What both handlers are given.
struct Given {
  Ints blocks, request, position, page_table;
  Halves k, v;
  Ints layer;
  int64_t ratio, tile_rows, splits, slice;
  float scale_log2e;
};

// Fills in everything but queries and results of `rows` rows; what does not fit together, or null.
const char* take(const Given& given, int64_t rows, AttendParams& p) {
  const auto pool = given.k.dimensions(), ids = given.blocks.dimensions(), table = given.page_table.dimensions();
  if (ids.size() != 2 || ids[0] != rows) return "blocks must be [rows, width] of the queries' rows";
  if (given.request.element_count() != static_cast<size_t>(rows) ||
      given.position.element_count() != given.request.element_count()) {
    return "request and position must have a number per row";
  }
  if (pool.size() != 5 || given.v.dimensions() != pool) {
    return "k and v must be [layers, pages, page_size, kv_heads, dim]";
  }
  if (table.size() != 2 || given.layer.element_count() != 1) return "page_table must be 2-d, layer one number";
  p.k = given.k.untyped_data(), p.v = given.v.untyped_data(), p.blocks = given.blocks.typed_data();
  p.request = given.request.typed_data(), p.position = given.position.typed_data();
  p.page_table = given.page_table.typed_data(), p.layer = given.layer.typed_data();
  p.rows = rows, p.layers = pool[0], p.pages = pool[1];
  const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
  p.page_size = narrow(pool[2]), p.kv_heads = narrow(pool[3]), p.dim = narrow(pool[4]);
  p.width = narrow(ids[1]), p.requests = narrow(table[0]), p.table_width = narrow(table[1]);
  p.ratio = narrow(given.ratio), p.tile_rows = narrow(given.tile_rows), p.splits = narrow(given.splits);
  p.slice = given.slice, p.scale_log2e = given.scale_log2e;
  return nullptr;
}

ffi::Error launch(AttendParams& p, ffi::Result<Ints> scratch, cudaStream_t stream) {
  p.scratch = scratch->typed_data(), p.scratch_size = static_cast<int64_t>(scratch->element_count());
  if (const char* why = problem(p)) return invalid(why);
  return launched(kWhat, launch_attend(p, stream));
}

ffi::Error attend(cudaStream_t stream, Halves q, Ints blocks, Ints request, Ints position, Ints page_table, Halves k,
                  Halves v, Ints layer, ffi::Result<Halves> o, ffi::Result<Floats> lse, ffi::Result<Ints> scratch,
                  int64_t ratio, int64_t tile_rows, int64_t splits, int64_t slice, float scale_log2e) {
  const auto shape = q.dimensions();
  if (shape.size() != 3) return invalid("q must be [rows, heads, dim]");
  AttendParams p{};
  const Given given{blocks, request, position, page_table, k, v, layer, ratio, tile_rows, splits, slice, scale_log2e};
  if (const char* why = take(given, shape[0], p)) return invalid(why);
  if (p.dim != shape[2]) return invalid("k and v must be of q's dim");
  if (o->dimensions() != shape || lse->element_count() != static_cast<size_t>(shape[0] * shape[1])) {
    return invalid("o must be like q, lse [rows, heads]");
  }
  p.heads = static_cast<int32_t>(shape[1]);
  p.q = q.untyped_data(), p.o = o->untyped_data(), p.lse = lse->typed_data();
  return launch(p, scratch, stream);
}

ffi::Error mix(cudaStream_t stream, Halves q_gate, Halves norm, Floats cos, Floats sin, Ints blocks, Ints request,
               Ints position, Ints page_table, Halves k, Halves v, Ints layer, ffi::Result<Halves> o,
               ffi::Result<Ints> scratch, int64_t ratio, int64_t tile_rows, int64_t splits, int64_t slice,
               float scale_log2e, float eps) {
  const auto shape = q_gate.dimensions(), angles = cos.dimensions(), out = o->dimensions();
  if (shape.size() != 2) return invalid("q_gate must be [rows, features]");
  AttendParams p{};
  const Given given{blocks, request, position, page_table, k, v, layer, ratio, tile_rows, splits, slice, scale_log2e};
  if (const char* why = take(given, shape[0], p)) return invalid(why);
  if (p.dim < 1 || shape[1] % (2 * p.dim) != 0) return invalid("q_gate must hold whole heads of 2 * dim features");
  if (norm.element_count() != static_cast<size_t>(p.dim)) return invalid("norm must have a weight per dim");
  if (angles.size() != 2 || angles[0] != shape[0] || sin.dimensions() != angles) {
    return invalid("cos and sin must be [rows, pairs]");
  }
  if (out.size() != 2 || out[0] != shape[0] || out[1] != shape[1] / 2) return invalid("o must be [rows, heads * dim]");
  p.heads = static_cast<int32_t>(shape[1] / (2 * p.dim));
  p.products = {q_gate.untyped_data(),
                norm.untyped_data(),
                {cos.typed_data(), sin.typed_data(), static_cast<int32_t>(angles[1])},
                eps};
  p.o = o->untyped_data();
  return launch(p, scratch, stream);
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
                                  .Ret<Floats>()
                                  .Ret<Ints>()
                                  .Attr<int64_t>("ratio")
                                  .Attr<int64_t>("tile_rows")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("slice")
                                  .Attr<float>("scale_log2e"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_qsa_mix, mix,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Ints>()
                                  .Ret<Halves>()
                                  .Ret<Ints>()
                                  .Attr<int64_t>("ratio")
                                  .Attr<int64_t>("tile_rows")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("slice")
                                  .Attr<float>("scale_log2e")
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop

}  // namespace jaxcp::qsa
