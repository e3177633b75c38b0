// The real kernel through the real FFI with all ranks of an exchange on one GPU: each on a stream of its own, forked
// from XLA's stream and joined to it again, so that a command buffer captures the fork too. For tests on one GPU.
//
// Operands and results are those of jaxcp_fused with a leading axis of ranks. Every rank's grid is capped at its share
// of the GPU, else one rank's waiting blocks keep another's senders out.
#include <cuda_runtime_api.h>

#include <vector>

#include "exchange.h"
#include "ffi_exchange.h"
#include "ffi_stream.h"

namespace jaxcp {
namespace {

// Side streams and their join events; made by the first, eager call, because a capture must not create them.
struct Fork {
  cudaEvent_t start;
  std::vector<cudaStream_t> streams;
  std::vector<cudaEvent_t> ends;

  explicit Fork(size_t ranks) : streams(ranks), ends(ranks) {
    cudaEventCreateWithFlags(&start, cudaEventDisableTiming);
    for (size_t i = 0; i < ranks; ++i) {
      cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking);
      cudaEventCreateWithFlags(&ends[i], cudaEventDisableTiming);
    }
  }
};

Fork& fork_of(size_t ranks) {
  static std::mutex mutex;
  static std::map<size_t, Fork> forks;
  const std::lock_guard lock(mutex);
  return forks.try_emplace(ranks, ranks).first->second;
}

ffi::Error launch_all(const std::vector<ExchangeParams>& calls, cudaStream_t stream) {
  Fork& fork = fork_of(calls.size());
  if (cudaError_t e = cudaEventRecord(fork.start, stream); e != cudaSuccess) return launched(e);
  for (size_t i = 0; i < calls.size(); ++i) {
    if (cudaError_t e = cudaStreamWaitEvent(fork.streams[i], fork.start, 0); e != cudaSuccess) return launched(e);
    if (cudaError_t e = launch_exchange(calls[i], fork.streams[i]); e != cudaSuccess) return launched(e);
    if (cudaError_t e = cudaEventRecord(fork.ends[i], fork.streams[i]); e != cudaSuccess) return launched(e);
    if (cudaError_t e = cudaStreamWaitEvent(stream, fork.ends[i], 0); e != cudaSuccess) return launched(e);
  }
  return ffi::Error::Success();
}

ffi::Error simulated(cudaStream_t stream, ffi::RunId run, ffi::AnyBuffer o, ffi::Buffer<ffi::F32> lse,
                     ffi::Buffer<ffi::U32>, ffi::Buffer<ffi::U32> places, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::Buffer<ffi::U32>>, ffi::Result<ffi::Buffer<ffi::F32>> out_lse, int64_t exchange,
                     int64_t site, int64_t base, Axes axes) {
  const int device = current_device();
  Registry& registry = Registry::instance();
  if (const auto why = registry.refusal(exchange, run.run_id)) return ffi::Error::Internal(*why);
  std::vector<ExchangeParams> calls;
  for (const auto& workspace : registry.on_device(exchange, device)) {
    if (ffi::Error error = ordered(*workspace, stream); error.failure()) return error;
    const Config& config = workspace->config;
    const auto in = o.dimensions();
    if (in.size() != 4 || in[0] != config.cp) return invalid("o must be [cp, tokens, heads, dim]");
    if (places.element_count() != static_cast<size_t>(config.cp)) return invalid("place must be [cp]");
    ExchangeParams p = workspace->params(site);
    p.place = places.typed_data() + config.rank;
    p.own_place = place_along(config, axes);
    const int64_t rank = config.rank, tokens = in[1], rows_in = tokens * config.heads, rows_out = tokens * p.heads_per_rank;
    const int64_t row_bytes = p.layout().row_bytes;
    p.o = static_cast<const char*>(o.untyped_data()) + rank * rows_in * row_bytes;
    p.lse = lse.typed_data() + rank * rows_in;
    p.out = static_cast<char*>(out->untyped_data()) + rank * rows_out * row_bytes;
    p.out_lse = out_lse->typed_data() + rank * rows_out;
    set_shape(config, tokens, base, p);
    if (const char* why = problem(p)) return invalid(why);
    if (cudaError_t e = resident_blocks(p, &p.grid_cap); e != cudaSuccess) return launched(e);
    p.grid_cap /= config.cp;
    ++workspace->launches;
    calls.push_back(p);
  }
  return calls.empty() ? not_made(exchange, device) : launch_all(calls, stream);
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_fused_simulated, simulated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("exchange")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("base")
                                  .Attr<Axes>("axes"),
                              {ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop

}  // namespace jaxcp
