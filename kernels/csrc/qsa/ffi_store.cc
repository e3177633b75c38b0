// XLA FFI handlers around a layer's products (platform "CUDA"): norm and rotation (heads.h), writes into the cache, in
// place (store.h). They launch only: calls can be captured.
//
// prepare      k, v bf16 [rows, kv_heads * dim], index bf16 [rows, (index_heads + 1) * index_dim], k_norm bf16 [dim],
//              index_norm bf16 [index_dim], cos, sin f32 [rows, pairs]
//              -> k and v side by side, bf16 [rows, 2, kv_heads, dim], index queries bf16 [rows, index_heads,
//              index_dim], raw index keys bf16 [rows, index_dim]; attribute eps
// store_kv     kv [rows, 2 * features] as stored, request, position i32 [rows], page_table i32 [requests, width], layer
//              i32 [], pools of k and v [layers, pages, page_size, ...] -> the pools
// store_index  keys bf16 [rows, index_dim]; norm bf16 [index_dim]; cos, sin f32 [rows, pairs]; the same [segments,
//              pairs] of pending blocks; rope i32 [3, rows]; segments i32 [4, segments]: first_row, count,
//              prefix, request; page_table; layer; index pool [layers, pages, page_size / ratio, index_dim], bf16 or
//              e4m3 bits; rings' keys bf16 and positions i32 [layers, 1 + requests, ring, ...]; faults i32 [2]
//              -> pool, rings' keys and positions, faults; attributes ratio, eps
#include "ffi.h"
#include "store.h"

namespace jaxcp::qsa {
namespace {

using Any = ffi::AnyBuffer;
constexpr const char* kWhat = "QSA cache";

ffi::Error invalid(const std::string& why) { return invalid_argument(kWhat, why); }

template <class Launch, class Params>
ffi::Error run(Launch launch, const Params& params, cudaStream_t stream) {
  if (const char* why = problem(params)) return invalid(why);
  return launched(kWhat, launch(params, stream));
}

int32_t narrow(int64_t x) { return static_cast<int32_t>(x); }

Pages pages_of(const Ints& page_table, const Ints& layer, int64_t layers, int64_t pages, int64_t page_size) {
  const auto table = page_table.dimensions();
  return {page_table.typed_data(),
          layer.typed_data(),
          narrow(table[0]),
          narrow(table[1]),
          narrow(page_size),
          layers,
          pages};
}

bool are_angles(const Floats& cos, const Floats& sin, int64_t rows) {
  const auto shape = cos.dimensions();
  return shape.size() == 2 && shape[0] == rows && sin.dimensions() == shape;
}

Angles angles_of(const Floats& cos, const Floats& sin) {
  return {cos.typed_data(), sin.typed_data(), narrow(cos.dimensions()[1])};
}

ffi::Error prepare(cudaStream_t stream, Halves k, Halves v, Halves index, Halves k_norm, Halves index_norm, Floats cos,
                   Floats sin, ffi::Result<Halves> kv_to, ffi::Result<Halves> q_to, ffi::Result<Halves> raw_to,
                   float eps) {
  const auto from = k.dimensions(), features = index.dimensions(), kv = kv_to->dimensions(), q = q_to->dimensions();
  if (from.size() != 2 || v.dimensions() != from || features.size() != 2 || kv.size() != 4 || q.size() != 3)
    return invalid("wrong ranks");
  const int64_t rows = from[0], dim = kv[3], index_dim = q[2];
  if (features[0] != rows || kv[0] != rows || q[0] != rows || kv[1] != 2 || from[1] != kv[2] * dim ||
      features[1] != (q[1] + 1) * index_dim || raw_to->element_count() != static_cast<size_t>(rows * index_dim) ||
      !are_angles(cos, sin, rows)) {
    return invalid("products, results and angles do not fit together");
  }
  if (k_norm.element_count() != static_cast<size_t>(dim) ||
      index_norm.element_count() != static_cast<size_t>(index_dim))
    return invalid("norms must have a weight per feature of a head");
  const auto at = [](auto& buffer, int64_t feature) { return static_cast<uint16_t*>(buffer.untyped_data()) + feature; };
  PrepareParams p{{}, 4, angles_of(cos, sin), eps, rows};
  p.of[0] = {at(k, 0), at(k_norm, 0), at(*kv_to, 0), from[1], dim, 2 * from[1], narrow(kv[2]), narrow(dim), false};
  p.of[1] = {at(v, 0), nullptr, at(*kv_to, from[1]), from[1], dim, 2 * from[1], narrow(kv[2]), narrow(dim), false};
  p.of[2] = {at(index, 0),     at(index_norm, 0), at(*q_to, 0),      features[1],      index_dim,
             q[1] * index_dim, narrow(q[1]),      narrow(index_dim), /*in_steps=*/true};
  p.of[3] = {at(index, q[1] * index_dim), nullptr,          at(*raw_to, 0), features[1], index_dim, index_dim, 1,
             narrow(index_dim),           /*in_steps=*/true};
  return run(launch_prepare, p, stream);
}

ffi::Error store_kv(cudaStream_t stream, Any kv, Ints request, Ints position, Ints page_table, Ints layer, Any k_pool,
                    Any v_pool, ffi::Result<Any> k_to, ffi::Result<Any> v_to) {
  const auto rows = kv.dimensions(), pool = k_pool.dimensions();
  if (rows.size() != 2 || pool.size() < 3 || v_pool.dimensions() != pool || page_table.dimensions().size() != 2 ||
      layer.element_count() != 1) {
    return invalid("kv must be [rows, 2 * features], the pools [layers, pages, page_size, ...]");
  }
  const auto n = static_cast<size_t>(rows[0]);
  if (request.element_count() != n || position.element_count() != n) return invalid("rows do not fit together");
  const size_t places = static_cast<size_t>(pool[0] * pool[1] * pool[2]);
  if (k_pool.element_type() != kv.element_type() || v_pool.element_type() != kv.element_type() ||
      2 * k_pool.size_bytes() * n != kv.size_bytes() * places) {
    return invalid("pools must hold rows such as kv's");
  }
  if (k_to->untyped_data() != k_pool.untyped_data() || v_to->untyped_data() != v_pool.untyped_data())
    return invalid("results must be the pools themselves");
  const StoreKvParams params{kv.untyped_data(),
                             request.typed_data(),
                             position.typed_data(),
                             k_to->untyped_data(),
                             v_to->untyped_data(),
                             pages_of(page_table, layer, pool[0], pool[1], pool[2]),
                             rows[0],
                             static_cast<int64_t>(k_pool.size_bytes() / places)};
  return run([](const StoreKvParams& p, cudaStream_t s) { return launch_store(p, s); }, params, stream);
}

ffi::Error store_index(cudaStream_t stream, Halves keys, Halves norm, Floats cos, Floats sin, Floats pending_cos,
                       Floats pending_sin, Ints rope, Ints runs, Ints page_table, Ints layer, Any pool,
                       Halves ring_keys, Ints ring_positions, Ints faults, ffi::Result<Any> pool_to,
                       ffi::Result<Halves> keys_to, ffi::Result<Ints> positions_to, ffi::Result<Ints> faults_to,
                       int64_t ratio, float eps) {
  const auto from = keys.dimensions(), shape = pool.dimensions(), ring = ring_keys.dimensions(),
             table = page_table.dimensions();
  if (from.size() != 2 || shape.size() != 4 || ring.size() != 4 || table.size() != 2 || layer.element_count() != 1)
    return invalid("wrong ranks");
  const int64_t rows = from[0], dim = shape[3], segments = static_cast<int64_t>(runs.element_count() / 4);
  if (from[1] != dim || norm.element_count() != static_cast<size_t>(dim) || !are_angles(cos, sin, rows) ||
      !are_angles(pending_cos, pending_sin, segments) || rope.element_count() != static_cast<size_t>(3 * rows)) {
    return invalid("keys, norm, angles and rope positions do not fit together");
  }
  if (runs.dimensions().size() != 2 || runs.dimensions()[0] != 4) return invalid("segments must be [4, segments]");
  if (ratio < 1 || ring[0] != shape[0] || ring[1] != table[0] + 1 || ring[3] != dim ||
      ring_positions.element_count() != static_cast<size_t>(ring[0] * ring[1] * ring[2] * 4) ||
      faults.element_count() != 2) {
    return invalid("pool, rings and faults do not fit together");
  }
  if (pool.element_type() != ffi::DataType::U8 && pool.element_type() != ffi::DataType::BF16)
    return invalid("index keys must be bf16, or u8 holding e4m3");
  if (pool_to->untyped_data() != pool.untyped_data() || keys_to->untyped_data() != ring_keys.untyped_data() ||
      positions_to->untyped_data() != ring_positions.untyped_data() ||
      faults_to->untyped_data() != faults.untyped_data()) {
    return invalid("results must be the cache's arrays themselves");
  }
  StoreIndexParams p{};
  p.keys = keys.untyped_data(), p.weight = norm.untyped_data();
  p.angles = angles_of(cos, sin), p.pending = angles_of(pending_cos, pending_sin);
  p.rope = rope.typed_data(), p.runs = runs.typed_data();
  p.pool = pool_to->untyped_data(), p.ring_keys = keys_to->untyped_data();
  p.ring_positions = positions_to->typed_data(), p.faults = faults_to->typed_data();
  p.at = pages_of(page_table, layer, shape[0], shape[1], shape[2] * ratio);
  p.rows = rows, p.segments = narrow(segments), p.dim = narrow(dim), p.ratio = narrow(ratio), p.ring = narrow(ring[2]);
  p.eps = eps, p.e4m3 = pool.element_type() == ffi::DataType::U8;
  return run([](const StoreIndexParams& q, cudaStream_t s) { return launch_store(q, s); }, p, stream);
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_qsa_prepare, prepare,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Halves>()
                                  .Ret<Halves>()
                                  .Ret<Halves>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_qsa_store_kv, store_kv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Any>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_qsa_store_index, store_index,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Any>()
                                  .Arg<Halves>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Any>()
                                  .Ret<Halves>()
                                  .Ret<Ints>()
                                  .Ret<Ints>()
                                  .Attr<int64_t>("ratio")
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop

}  // namespace jaxcp::qsa
