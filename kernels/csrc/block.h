// What a workspace's memory block must look like: one implementation per protocol, chosen at link time.
//
// fused_block.cc: protocol.h, for the fused kernel and its host twin.     flashinfer_block.cc: FlashInfer's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "workspace.h"

namespace jaxcp::block {

std::size_t bytes(const Config& config);
uint32_t version();  // of layout and transport

// Puts the block into its first state, before the call returns: a fast peer may write as soon as it can map it.
void blank(const Config& config, std::uint8_t* block);

// Tells the block where its peers' are, after all have been mapped.
void connect(const Config& config, std::uint8_t* block, const std::vector<std::uint8_t*>& by_rank);

uint32_t read_call(const Config& config, const std::uint8_t* block);
void write_call(const Config& config, std::uint8_t* block, uint32_t number);

}  // namespace jaxcp::block
