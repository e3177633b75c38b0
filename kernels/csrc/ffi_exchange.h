// What the FFI handlers of the GPU and of its host twin share: buffers and attributes in, a checked call out.
//
// Operands:   o [tokens, heads, dim], lse [tokens, heads] f32, token u32 (read by nobody: it orders calls), place u32
// Results:    out [tokens, heads_per_rank, dim], token u32, and optionally lse [tokens, heads_per_rank] f32
// Attributes: exchange, site (of the call in the program), base, axes
// place: of the device in the program's mesh, counted over the axes that the program knows, as the exchange's mesh counts.
// axes: (stride, size) of each of these in the exchange's mesh; places differ by the stride along an axis.
#pragma once

#include <string>

#include "workspace.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcp {

namespace ffi = xla::ffi;

inline ffi::Error invalid(const std::string& what) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jaxcp exchange: " + what); }

inline ffi::Error not_made(int64_t exchange, int32_t device) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "jaxcp exchange: exchange " + std::to_string(exchange) + " is closed, or was never made for device " + std::to_string(device));
}

inline bool same_dtype(ffi::DataType got, Dtype expected) {
  switch (expected) {
    case Dtype::bfloat16: return got == ffi::DataType::BF16;
    case Dtype::float16: return got == ffi::DataType::F16;
    case Dtype::float32: return got == ffi::DataType::F32;
  }
  return false;
}

using Axes = ffi::Span<const int64_t>;

// Where the program will find this device if its mesh is the exchange's.
inline uint32_t place_along(const Config& config, Axes axes) {
  int64_t place = 0;
  for (size_t i = 0; i + 1 < axes.size(); i += 2) place += config.place / axes[i] % axes[i + 1] * axes[i];
  return static_cast<uint32_t>(place);
}

// XLA's arrays are dense, row-major.
inline void set_shape(const Config& config, int64_t tokens, int64_t base, ExchangeParams& p) {
  p.tokens = static_cast<int32_t>(tokens);
  p.o_token_stride = int64_t{config.heads} * config.head_dim;
  p.o_head_stride = config.head_dim;
  p.lse_token_stride = config.heads;
  p.lse_head_stride = 1;
  p.base = static_cast<Base>(base);
}

// Puts the buffers of a call into `p`; an error if they are not what the workspace was made for.
inline ffi::Error take_buffers(const Config& config, ffi::AnyBuffer o, ffi::Buffer<ffi::F32> lse, ffi::Result<ffi::AnyBuffer> out,
                               ffi::RemainingRets more, int64_t base, ExchangeParams& p) {
  const auto in = o.dimensions(), result = out->dimensions();
  if (in.size() != 3 || in[1] != config.heads || in[2] != config.head_dim || !same_dtype(o.element_type(), p.dtype)) {
    return invalid("o is not what exchange " + std::to_string(config.exchange) + " was made for; was the program made for another one?");
  }
  if (in[0] > config.max_tokens) return invalid(std::to_string(in[0]) + " tokens exceed max_tokens");
  if (lse.element_count() != static_cast<size_t>(in[0] * in[1])) return invalid("lse must be [tokens, heads]");
  if (result.size() != 3 || result[0] != in[0] || result[1] != p.heads_per_rank || result[2] != in[2]) {
    return invalid("out must be [tokens, heads_per_rank, dim]");
  }
  p.o = o.untyped_data();
  p.lse = lse.typed_data();
  p.out = out->untyped_data();
  if (more.size() > 0) {
    const auto merged = more.get<ffi::Buffer<ffi::F32>>(0);
    if (!merged.has_value()) return merged.error();
    p.out_lse = (*merged)->typed_data();
  }
  set_shape(config, in[0], base, p);
  const char* why = problem(p);
  return why == nullptr ? ffi::Error::Success() : invalid(why);
}

}  // namespace jaxcp
