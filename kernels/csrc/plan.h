// What all threads of a call need and only its host must compute.
#pragma once

#include "schedule.h"

namespace jaxcp {

constexpr int kThreads = 256;  // of a block; figures in kernels/README.md

// A group of lanes owns a row: the power of two next to its units, at most a warp.
struct Plan {
  Schedule schedule;
  Divider by_peers, by_heads;  // c - 1, heads per rank
  uint32_t rank, heads, rows;  // rows: that each rank keeps
  uint32_t group_shift;        // log2 of the lanes per row
  uint32_t units;              // of 16 bytes per row
  uint32_t row_bytes;
  uint32_t data_step, lse_step;  // bytes between the rows of two sources
  uint32_t o_token, o_head;      // strides of o in units
  uint32_t lse_token, lse_head;  // strides of lse in elements
  uint64_t data_begin;           // byte offset in a workspace
  uint64_t data_slot, lse_slot;  // bytes between two slots

  static Plan of(const ExchangeParams& p, uint32_t blocks) {
    const Layout layout = p.layout();
    Plan plan{};
    const int per_unit = jaxcp::per_unit(p.dtype);
    plan.units = static_cast<uint32_t>(p.dim / per_unit);
    while (plan.group_shift < 5 && (1u << plan.group_shift) < plan.units) ++plan.group_shift;
    plan.rank = static_cast<uint32_t>(p.rank);
    plan.heads = static_cast<uint32_t>(p.heads);
    plan.rows = static_cast<uint32_t>(p.rows());
    plan.schedule = Schedule::of(plan.rows, kThreads >> plan.group_shift, static_cast<uint32_t>(p.cp - 1), blocks);
    plan.by_peers = Divider::of(static_cast<uint32_t>(p.cp - 1));
    plan.by_heads = Divider::of(static_cast<uint32_t>(p.heads_per_rank));
    plan.row_bytes = static_cast<uint32_t>(layout.row_bytes);
    plan.data_step = static_cast<uint32_t>(layout.capacity) * plan.row_bytes;
    plan.lse_step = static_cast<uint32_t>(layout.capacity) * sizeof(float);
    plan.o_token = static_cast<uint32_t>(p.o_token_stride / per_unit);
    plan.o_head = static_cast<uint32_t>(p.o_head_stride / per_unit);
    plan.lse_token = static_cast<uint32_t>(p.lse_token_stride);
    plan.lse_head = static_cast<uint32_t>(p.lse_head_stride);
    plan.data_begin = layout.data_begin();
    plan.data_slot = layout.rows() * plan.row_bytes;
    plan.lse_slot = layout.rows() * sizeof(float);
    return plan;
  }
};

}  // namespace jaxcp
