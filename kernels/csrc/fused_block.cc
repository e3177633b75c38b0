#include "block.h"

namespace jaxcp::block {

std::size_t bytes(const Config& config) { return config.layout().bytes(); }
uint32_t version() { return kVersion; }

void blank(const Config& config, std::uint8_t* block) {
  memory::fill(config.device, block, 0, sizeof(Control));
  memory::fill(config.device, block + sizeof(Control), 0xFF, bytes(config) - sizeof(Control));
}

void connect(const Config&, std::uint8_t*, const std::vector<std::uint8_t*>&) {}  // addresses travel as launch arguments

uint32_t read_call(const Config& config, const std::uint8_t* block) {
  uint64_t word = 0;
  memory::copy_to_host(config.device, &word, block + offsetof(Control, call_and_tickets), sizeof word);
  return call_of(word);
}

void write_call(const Config& config, std::uint8_t* block, uint32_t number) {
  const uint64_t word = first_of_call(number);
  memory::copy_to_device(config.device, block + offsetof(Control, call_and_tickets), &word, sizeof word);
}

}  // namespace jaxcp::block
