// Angles of a rotary embedding, as fp32 cosines and sines; see jaxcp/qsa/rope.py.
#pragma once

#include <cstdint>

namespace jaxcp::qsa {

struct Angles {
  const float *cos, *sin;  // [rows, pairs]
  int32_t pairs;           // a multiple of 8
};

}  // namespace jaxcp::qsa
