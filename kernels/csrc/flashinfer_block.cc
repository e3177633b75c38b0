// FlashInfer's block, followed by the device array of peer addresses that the shim's window points to.
#include "block.h"
#include "flashinfer.h"

namespace jaxcp::block {
namespace {

FlashInferLayout layout(const Config& config) { return {config.cp, config.max_tokens * config.heads_per_rank(), config.head_dim * 2}; }

}  // namespace

std::size_t bytes(const Config& config) { return flashinfer_table(layout(config)) + static_cast<std::size_t>(config.cp) * sizeof(void*); }
uint32_t version() { return 0x74; }  // FlashInfer 0.7.4's layout

void blank(const Config& config, std::uint8_t* block) { memory::fill(config.device, block, 0, layout(config).zero_bytes()); }

void connect(const Config& config, std::uint8_t* block, const std::vector<std::uint8_t*>& by_rank) {
  memory::copy_to_device(config.device, block + flashinfer_table(layout(config)), by_rank.data(), by_rank.size() * sizeof(void*));
}

uint32_t read_call(const Config& config, const std::uint8_t* block) {
  uint32_t epoch = 0;
  memory::copy_to_host(config.device, &epoch, block, sizeof epoch);
  return epoch;
}

void write_call(const Config& config, std::uint8_t* block, uint32_t number) {
  memory::copy_to_device(config.device, block, &number, sizeof number);
}

}  // namespace jaxcp::block
