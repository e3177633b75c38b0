// FlashInfer's kernel on the simulated ranks: its workspaces, its input order, its launches.
#pragma once

#include "flashinfer.h"
#include "ranks.cuh"

namespace jaxcp::test {

// [tokens, cp * h, dim] -> [tokens, h, cp, dim], the order that the kernel reads; lse likewise. A block per row.
__global__ void reorder(const uint16_t* o, const float* lse, uint16_t* to_o, float* to_lse, int cp, int heads_per_rank,
                        int dim) {
  const int heads = cp * heads_per_rank, token = blockIdx.x / heads, head = blockIdx.x % heads;
  const int64_t to = int64_t{token} * heads + head % heads_per_rank * cp + head / heads_per_rank;
  for (int d = threadIdx.x; d < dim; d += blockDim.x) to_o[to * dim + d] = o[int64_t{blockIdx.x} * dim + d];
  if (threadIdx.x == 0) to_lse[to] = lse[blockIdx.x];
}

// Heads must be a multiple of cp. Outputs go to the outputs of `ranks`.
class FlashInferRanks {
 public:
  explicit FlashInferRanks(Ranks& r)
      : ranks(r), layout_{r.shape.cp, r.shape.layout().capacity, r.shape.dim * 2}, table_(r.shape.cp) {
    std::vector<uint8_t*> table;
    for (int rank = 0; rank < r.shape.cp; ++rank) {
      table.push_back(workspaces_.emplace_back(layout_.bytes()).get());
      o_.emplace_back(r.o[rank].bytes() / 2);
      lse_.emplace_back(r.lse[rank].bytes() / 4);
      CHECK(reset_flashinfer(workspaces_[rank].get(), layout_, r.streams[rank]));
    }
    CHECK(cudaMemcpy(table_.get(), table.data(), table_.bytes(), cudaMemcpyHostToDevice));
    r.wait();
  }

  void take_inputs() {
    for (int rank = 0; rank < ranks.shape.cp; ++rank) take_input(rank, ranks.shape.tokens);
    ranks.wait();
  }
  // The copy that the kernel's input order costs.
  void take_input(int rank, int tokens) const {
    reorder<<<tokens * ranks.shape.heads, 128, 0, ranks.streams[rank]>>>(
        ranks.o[rank].get(), ranks.lse[rank].get(), o_[rank].get(), lse_[rank].get(), ranks.shape.cp,
        ranks.shape.heads_per_rank(), ranks.shape.dim);
  }

  void launch(int rank, int tokens) const {
    const Shape& s = ranks.shape;
    const FlashInferParams p{o_[rank].get(),
                             lse_[rank].get(),
                             ranks.out[rank].get(),
                             workspaces_[rank].get(),
                             table_.get(),
                             rank,
                             s.cp,
                             tokens * s.heads_per_rank(),
                             layout_.capacity,
                             s.dim,
                             s.dtype,
                             s.base};
    if (const char* why = problem(p)) throw std::runtime_error(why);
    CHECK(launch_flashinfer(p, kResident / s.cp, ranks.streams[rank]));
  }
  void call(int tokens) const {
    for (int rank = 0; rank < ranks.shape.cp; ++rank) launch(rank, tokens);
  }

  Ranks& ranks;

 private:
  static constexpr int kResident = 132 * 8;  // blocks of 128 threads that fit, with some to spare

  FlashInferLayout layout_;
  Buffer<uint8_t*> table_;
  std::vector<Buffer<uint8_t>> workspaces_;
  std::vector<Buffer<uint16_t>> o_;
  std::vector<Buffer<float>> lse_;
};

}  // namespace jaxcp::test
