// Times of block selection on random keys: median over runs of a captured graph of launches, in ms.
//
// qsa_select_bench ROWS BLOCKS [METHOD [REQUESTS]]   rows: the last positions of a context of BLOCKS blocks of 4
// tokens,
//                                                    dealt out evenly over the requests; method "stored", "streaming",
//                                                    "top"
#include <cstring>

#include "qsa_select_problem.cuh"

namespace {

using namespace jaxcp::test;
using jaxcp::qsa::kStreamBytes;

__global__ void fill_normal(__nv_bfloat16* x, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t h = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ull, h = (h ^ h >> 27) * 0x94D049BB133111EBull, h ^= h >> 31;
    const float u = (static_cast<uint32_t>(h) + 1.0f) * 0x1p-32f, v = static_cast<uint32_t>(h >> 32) * 0x1p-32f;
    x[i] = __float2bfloat16(sqrtf(-2 * logf(fminf(u, 1.0f))) * cospif(2 * v));
  }
}

__global__ void fill_scores(float* x, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t h = (i + 1) * 0x9E3779B97F4A7C15ull;
    x[i] = (h >> 40) * 0x1p-24f + (h * 0xBF58476D1CE4E5B9ull >> 40) * 0x1p-24f;
  }
}

template <class Launch>
double median_ms(Launch launch) {
  constexpr int kLaunches = 5, kRuns = 9;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  launch(stream);
  cudaGraph_t graph;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kLaunches; ++i) launch(stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRuns + 1; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i > 0) times.push_back(ms / kLaunches);
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return 2;
  const int rows = std::atoi(arguments[1]), blocks = std::atoi(arguments[2]),
            requests = count > 4 ? std::atoi(arguments[4]) : 1;
  const std::string method = count > 3 ? arguments[3] : "streaming";
  try {
    CHECK(jaxcp::qsa::load_select());
    const int page_blocks = 16, pages = (blocks + page_blocks - 1) / page_blocks, each = rows / requests;
    std::vector<int32_t> request, position, table(size_t{1} * requests * pages);
    for (int i = 0; i < rows; ++i) request.push_back(i / each), position.push_back(blocks * 4 - each + i % each);
    std::iota(table.begin(), table.end(), 1);
    std::shuffle(table.begin(), table.end(), std::mt19937(3));
    const Device<int32_t> on_request(request), on_position(position), on_table(table), layer(std::vector<int32_t>{0});
    const int64_t key_count = int64_t{requests * pages + 1} * page_blocks * 128, query_count = int64_t{rows} * 512;
    const Device<__nv_bfloat16> keys(key_count), queries(query_count);
    fill_normal<<<1024, 256>>>(keys.get(), key_count, 1);
    fill_normal<<<1024, 256>>>(queries.get(), query_count, 2);
    Device<int32_t> ids(size_t{512} * rows);
    SelectParams p{};
    const int64_t stride = (blocks + 63) / 64 * 64;
    const bool streaming = method == "streaming";
    p.scratch_bytes =
        streaming ? 160 * kStreamBytes
                  : std::max(std::min(rows * stride * 4, int64_t{64} << 20), method == "top" ? rows * stride * 4 : 0);
    const Device<uint8_t> scratch(p.scratch_bytes);
    p.index_q = queries.get(), p.pool = keys.get(), p.layer = layer.get(), p.page_table = on_table.get();
    p.request = on_request.get(), p.position = on_position.get(), p.ids = ids.get(), p.scratch = scratch.get();
    p.rows = rows, p.heads = 4, p.dim = 128, p.k = 512, p.layers = 1, p.pages = requests * pages + 1,
    p.page_blocks = page_blocks;
    p.requests = requests, p.request_pages = pages, p.ratio = 4, p.blocks = blocks, p.longest = each;
    p.method = streaming ? Method::streaming : Method::stored;
    if (const char* why = jaxcp::qsa::problem(p)) throw std::runtime_error(why);
    double ms;
    if (method == "top") {
      fill_scores<<<1024, 256>>>(static_cast<float*>(p.scratch), rows * stride);
      const jaxcp::qsa::ScoredRows scored{
          static_cast<float*>(p.scratch), stride, p.position, p.ids, rows, p.k, p.ratio, blocks};
      ms = median_ms([&](cudaStream_t stream) { CHECK(launch_top_blocks(scored, stream)); });
    } else {
      ms = median_ms([&](cudaStream_t stream) { CHECK(jaxcp::qsa::launch_select(p, stream)); });
    }
    std::printf("%d rows, %d blocks, %d requests, %s: %.4f ms\n", rows, blocks, requests, method.c_str(), ms);
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
