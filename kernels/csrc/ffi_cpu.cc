// XLA FFI handlers of the host twin (platform "cpu"), and the stand-in for the GPU's that can only be compiled.
#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "ffi_exchange.h"
#include "twin.h"

namespace jaxcp {
namespace {

ffi::Future failed(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

ffi::Error call(const ExchangeParams& params) {
  try {
    twin::exchange(params);
    return ffi::Error::Success();
  } catch (const std::exception& error) {  // out of memory
    return ffi::Error::Internal(std::string("jaxcp: ") + error.what());
  }
}

// A call waits for its peers on a thread of its own. XLA:CPU's devices share one pool of threads, which the waiting calls
// of some devices together with their psums could fill before the other devices have begun theirs.
ffi::Future run(std::unique_ptr<Running> running, const ExchangeParams& params) {
  ffi::Promise promise;
  ffi::Future future(promise);
  try {
    std::thread([running = std::move(running), params, promise]() mutable {
      ffi::Error error = call(params);
      running.reset();  // before anybody can see the result: who has seen all results may close the exchange
      error.failure() ? promise.SetError(std::move(error)) : promise.SetAvailable();
    }).detach();
  } catch (const std::system_error& error) {
    return failed(ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("jaxcp: no thread for a call: ") + error.what()));
  }
  return future;
}

ffi::Future fused(int32_t device, ffi::RunId run_id, ffi::AnyBuffer o, ffi::Buffer<ffi::F32> lse, ffi::Buffer<ffi::U32>,
                  ffi::Buffer<ffi::U32> place, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::U32>> token, ffi::RemainingRets more,
                  int64_t exchange, int64_t site, int64_t base, Axes axes) {
  Registry& registry = Registry::instance();
  if (const auto why = registry.refusal(exchange, run_id.run_id)) return failed(ffi::Error::Internal(*why));
  const auto workspaces = registry.on_device(exchange, device);
  if (workspaces.empty()) return failed(not_made(exchange, device));
  Workspace& workspace = *workspaces.front();
  ExchangeParams params = workspace.params(site);
  params.place = place.typed_data();
  params.own_place = place_along(workspace.config, axes);
  if (ffi::Error error = take_buffers(workspace.config, o, lse, out, more, base, params); error.failure()) {
    return failed(std::move(error));
  }
  std::unique_ptr<Running> running;
  try {
    running = std::make_unique<Running>(workspaces.front());
  } catch (const std::exception& error) {
    return failed(ffi::Error::Internal(std::string("jaxcp: ") + error.what()));
  }
  ++workspace.launches;
  token->typed_data()[0] = 0;
  return run(std::move(running), params);
}

ffi::Error compile_only(ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error::Internal("jaxcp: this program was compiled without a GPU, to be read and not run");
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_fused, fused,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::U32>>()
                                  .RemainingRets()
                                  .Attr<int64_t>("exchange")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("base")
                                  .Attr<Axes>("axes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcp_compile_only, compile_only, ffi::Ffi::Bind().RemainingArgs().RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop

}  // namespace jaxcp
