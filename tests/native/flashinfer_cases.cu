// FlashInfer's kernel through our launcher, on simulated ranks: the second opinion. Its waits have no end, so the
// caller of this program bounds it.
#include "flashinfer_ranks.cuh"

int main() {
  using namespace jaxcp;
  using namespace jaxcp::test;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  try {
    CHECK(load_exchange());
    CHECK(load_flashinfer());
    uint64_t seed = 1000;
    // One row, below 16 rows and from 16 on (its two forms), a full workspace.
    for (Shape shape : {Shape{2, 8, 32, 512}, Shape{4, 8, 8, 128}, Shape{8, 4, 128, 512}}) {
      for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
        for (const Base base : {Base::two, Base::e}) {
          shape.dtype = dtype, shape.base = base;
          Ranks ranks(shape);
          ranks.with_lse = false;
          FlashInferRanks theirs(ranks);
          for (const int tokens : {1, 3, shape.tokens, 1}) {
            ranks.fill(++seed);
            theirs.take_inputs();
            ranks.poison();
            theirs.call(tokens);
            ranks.judge(tokens, "flashinfer, cp " + std::to_string(shape.cp) + ", tokens " + std::to_string(tokens));
          }
        }
      }
    }
  } catch (const std::exception& error) {
    std::printf("flashinfer: FAILED: %s\n", error.what());
    return 1;
  }
  std::printf("flashinfer: ok\n");
}
