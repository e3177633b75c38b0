// Durations of kernels as the profiling interface of the driver (CUPTI) records them.
#pragma once

#include <cupti.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace jaxcp::test {

// Records while it lives. One at a time.
class KernelTimes {
 public:
  KernelTimes() {
    durations() = {};
    check(cuptiActivityRegisterCallbacks(provide, consume));
    check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
  }
  ~KernelTimes() { cuptiActivityDisable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL); }

  // Median duration in us of the kernels whose name contains `name`, on the stream where that is longest.
  double slowest_median(const std::string& name) {
    check(cuptiActivityFlushAll(1));
    double slowest = 0;
    for (auto& [stream, entries] : durations()) {
      std::vector<double> times;
      for (const auto& [kernel, microseconds] : entries) {
        if (kernel.find(name) != std::string::npos) times.push_back(microseconds);
      }
      if (times.empty()) continue;
      std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
      slowest = std::max(slowest, times[times.size() / 2]);
    }
    if (slowest == 0) throw std::runtime_error("no kernel called " + name + " was recorded");
    return slowest;
  }

 private:
  using Entries = std::map<uint32_t, std::vector<std::pair<std::string, double>>>;  // by stream
  static Entries& durations() {
    static Entries entries;
    return entries;
  }
  static void check(CUptiResult result) {
    if (result != CUPTI_SUCCESS) throw std::runtime_error("CUPTI error " + std::to_string(result));
  }
  static void CUPTIAPI provide(uint8_t** buffer, size_t* size, size_t* records) {
    *size = 1 << 20, *records = 0;
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *size));
  }
  static void CUPTIAPI consume(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
      if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL && record->kind != CUPTI_ACTIVITY_KIND_KERNEL) continue;
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel9*>(record);
      durations()[kernel->streamId].emplace_back(kernel->name, (kernel->end - kernel->start) * 1e-3);
    }
    std::free(buffer);
  }
};

}  // namespace jaxcp::test
