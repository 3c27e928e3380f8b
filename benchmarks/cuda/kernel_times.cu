// Times the kernels themselves on two GPUs of one host, without Python: graphs of 50 calls, replayed, wall time / 50,
// over grid shapes. Verifies every row, its order, its small data and the sums. Prints one JSON object per line.
//   nvcc -arch=sm_90 -std=c++20 -O3 --fmad=false -o kernel_times benchmarks/cuda/kernel_times.cu csrc/ops/choose_grid.cpp
//   ./kernel_times
// Add -DMORI_TRACED=1 for a trace of one small call.
#ifndef MORI_TRACED
#define MORI_TRACED 0
#endif
#define MORI_SHAPE_WORLD_SIZE 2
#define MORI_SHAPE_MAX_TOKENS 4096
#define MORI_SHAPE_HIDDEN_DIM 7168
#define MORI_SHAPE_MAX_ELEMENT_BYTES 2
#define MORI_SHAPE_SCALE_DIM 56
#define MORI_SHAPE_SCALE_ELEMENT_BYTES 4
#define MORI_SHAPE_EXPERTS_PER_RANK 128
#define MORI_SHAPE_TOPK 8
#define MORI_SHAPE_MAX_RECV_TOKENS 8192
#define MORI_SHAPE_MAY_STAGE 0
#define MORI_SHAPE_BLOCK_SCALES 0
#define MORI_SHAPE_SLOT_STRIDE 0
#define MORI_SHAPE_SOURCE_STRIDE 0
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/device/target_cuda.hpp"
#include "../../csrc/kernels/kernels.hpp"
#include "../../csrc/ops/choose_grid.hpp"

#define CHECK(call)                                                                        \
  do {                                                                                     \
    const cudaError_t error = (call);                                                      \
    if (error != cudaSuccess) {                                                            \
      std::printf("%s, line %d: %s\n", #call, __LINE__, cudaGetErrorString(error));        \
      std::exit(1);                                                                        \
    }                                                                                      \
  } while (0)

using namespace mori;
using std::vector;

namespace {

constexpr u32 world = 2, topk = 8, experts = 128, max_tokens = 4096, hidden = 7168, scale_count = 56;
constexpr int calls = 50, replays = 12;

struct Rank {
  cudaStream_t stream;
  EpArgs ep{};
  u8* input;
  float* weights;
  u8* scales;
  i32* indices;
  u8* external;
  vector<u8> host_input;
  vector<i32> host_indices;
  vector<float> host_weights;
};

Rank ranks[world];
EpLayout layout;

template <KernelId id>
__global__ void __launch_bounds__(512, 1) kernel(const __grid_constant__ typename KernelOf<CudaTarget, id>::Args args) {
  CudaTarget target;
  run_kernel<CudaTarget, id>(target, args);
}

Routing own_routing(const EpArgs& ep) {
  return {ep.own<u32>(RegionId::sender_map), ep.own<u32>(RegionId::received_count),
          ep.own<RoutingSummary>(RegionId::control, ControlWords(world).summary())};
}

template <class Type>
Type* device_copy(const vector<Type>& host) {
  Type* device;
  CHECK(cudaMalloc(&device, host.size() * sizeof(Type)));
  CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(Type), cudaMemcpyHostToDevice));
  return device;
}

void set_up() {
  EpShape shape{world, 0, max_tokens, hidden, 2, scale_count, 4, experts, topk, world * max_tokens};
  layout = ep_layout(shape);
  u64 slice[world];
  for (u32 r = 0; r < world; ++r) {
    CHECK(cudaSetDevice(r));
    CHECK(cudaDeviceEnablePeerAccess(1 - r, 0));
    void* memory;
    CHECK(cudaMalloc(&memory, comm_control_bytes + layout.total_bytes));
    CHECK(cudaMemset(memory, 0, comm_control_bytes + layout.total_bytes));
    const u64 live = (1ull << world) - 1;
    CHECK(cudaMemcpy(static_cast<u8*>(memory) + offsetof(CommControl, live), &live, 8, cudaMemcpyHostToDevice));
    slice[r] = reinterpret_cast<u64>(memory);
    CHECK(cudaStreamCreateWithFlags(&ranks[r].stream, cudaStreamNonBlocking));
  }
  std::mt19937 random(1);
  for (u32 r = 0; r < world; ++r) {
    CHECK(cudaSetDevice(r));
    Rank& rank = ranks[r];
    rank.ep.symmetric = {slice[0], slice[1] - slice[0], r, world};
    rank.ep.window = comm_control_bytes;
    rank.ep.shape = shape;
    rank.ep.shape.rank = r;
    rank.ep.layout = layout;
    rank.ep.experts = Divider::by(experts);
    rank.ep.timeout_ns = 2'000'000'000;
    rank.host_input.resize(u64(max_tokens) * hidden * 2);
    for (u64 i = 0; i < rank.host_input.size(); i += 2) {
      rank.host_input[i] = u8(random());
      rank.host_input[i + 1] = u8(0x3f | (random() & 0x80));
    }
    rank.host_indices.resize(max_tokens * topk);
    for (i32& id : rank.host_indices) id = i32(random() % (world * experts));
    rank.host_weights.resize(max_tokens * topk);
    for (float& weight : rank.host_weights) weight = float(random() % 1000) / 1000;
    rank.input = device_copy(rank.host_input);
    rank.indices = device_copy(rank.host_indices);
    rank.weights = device_copy(rank.host_weights);
    rank.scales = device_copy(vector<u8>(max_tokens * scale_count * 4, 7));
    CHECK(cudaMalloc(reinterpret_cast<void**>(&rank.external), u64(world) * max_tokens * hidden * 2));
    CHECK(cudaDeviceSynchronize());
  }
}

struct Case {
  u32 tokens, row_bytes, blocks, warps, parts;
  bool weights, scales, external;
  u32 stagers = 1;
};

void launch_dispatch(Rank& rank, const Case& c) {
  DispatchArgs args{};
  args.ep = rank.ep;
  args.routing = own_routing(rank.ep);
  args.halves = whole_call;
  args.input = rank.input;
  args.weights = c.weights ? rank.weights : nullptr;
  args.scales = c.scales ? rank.scales : nullptr;
  args.indices = rank.indices;
  args.tokens = c.tokens;
  args.row_bytes = c.row_bytes;
  args.scale_bytes = c.scales ? scale_count * 4 : 0;
  args.dtype = 1;
  args.parts = c.parts;
  kernel<KernelId::dispatch><<<c.blocks, c.warps * 32, DispatchScratch::bytes(world, c.warps), rank.stream>>>(args);
}

void launch_combine(Rank& rank, const Case& c) {
  CombineArgs args{};
  args.ep = rank.ep;
  args.routing = own_routing(rank.ep);
  args.halves = whole_call;
  args.input = c.external ? rank.external : nullptr;
  args.weights = c.weights ? rank.ep.own<float>(RegionId::dispatch_weights) : nullptr;
  args.input_rows = args.weight_rows = world * max_tokens;
  args.tokens = c.tokens;
  args.row_bytes = c.row_bytes;
  args.dtype = 1;
  args.parts = c.parts;
  args.stagers = c.stagers;
  kernel<KernelId::combine_bf16><<<c.blocks, c.warps * 32, CombineScratch::bytes(world, topk, c.warps), rank.stream>>>(args);
}

enum class Mode { dispatch, combine, pair };

// Median over replays of the slower rank's time per call, in microseconds.
double measure(const Case& dispatch, const Case& combine, Mode mode) {
  cudaGraphExec_t graphs[world];
  for (u32 r = 0; r < world; ++r) {
    CHECK(cudaSetDevice(r));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(ranks[r].stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) {
      if (mode != Mode::combine) launch_dispatch(ranks[r], dispatch);
      if (mode != Mode::dispatch) launch_combine(ranks[r], combine);
    }
    CHECK(cudaStreamEndCapture(ranks[r].stream, &graph));
    CHECK(cudaGraphInstantiate(&graphs[r], graph, 0));
    CHECK(cudaGraphDestroy(graph));
  }
  std::atomic<int> barrier{0};
  vector<double> times[world];
  std::thread threads[world];
  for (u32 r = 0; r < world; ++r) {
    threads[r] = std::thread([&, r] {
      CHECK(cudaSetDevice(r));
      cudaEvent_t begin, end;
      CHECK(cudaEventCreate(&begin));
      CHECK(cudaEventCreate(&end));
      for (int i = 0; i < replays; ++i) {
        ++barrier;
        while (barrier < int(world) * (i + 1)) {
        }
        CHECK(cudaEventRecord(begin, ranks[r].stream));
        CHECK(cudaGraphLaunch(graphs[r], ranks[r].stream));
        CHECK(cudaEventRecord(end, ranks[r].stream));
        CHECK(cudaStreamSynchronize(ranks[r].stream));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 2) times[r].push_back(1e3 * ms / calls);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  double slowest = 0;
  for (u32 r = 0; r < world; ++r) {
    std::sort(times[r].begin(), times[r].end());
    slowest = std::max(slowest, times[r][times[r].size() / 2]);
    CHECK(cudaGraphExecDestroy(graphs[r]));
  }
  return slowest;
}

template <class Type>
vector<Type> region(u32 r, RegionId id, u64 count) {
  vector<Type> host(count);
  CHECK(cudaSetDevice(r));
  CHECK(cudaMemcpy(host.data(), ranks[r].ep.own<void>(id), count * sizeof(Type), cudaMemcpyDeviceToHost));
  return host;
}

float value(const u8* bf16) {
  u16 bits;
  std::memcpy(&bits, bf16, 2);
  const u32 wide = u32(bits) << 16;
  float result;
  std::memcpy(&result, &wide, 4);
  return result;
}

// One dispatch and one combine of what was dispatched, checked against the inputs.
u64 wrong(Case c) {
  for (int step = 0; step < 2; ++step) {
    for (Rank& rank : ranks) {
      CHECK(cudaSetDevice(rank.ep.symmetric.rank));
      if (step == 0) launch_dispatch(rank, c);
      if (step == 1) {
        CHECK(cudaMemcpyAsync(c.external ? static_cast<void*>(rank.external) : rank.ep.own<void>(RegionId::combine_in_rows),
                              rank.ep.own<void>(RegionId::dispatch_rows), u64(world) * c.tokens * c.row_bytes,
                              cudaMemcpyDeviceToDevice, rank.stream));
        launch_combine(rank, c);
      }
    }
    for (Rank& rank : ranks) CHECK(cudaStreamSynchronize(rank.stream));
  }
  u64 bad = 0;
  for (u32 d = 0; d < world; ++d) {
    const u32 received = region<u32>(d, RegionId::received_count, 1)[0];
    const auto rows = region<u8>(d, RegionId::dispatch_rows, u64(received) * c.row_bytes);
    const auto ids = region<i32>(d, RegionId::dispatch_indices, u64(received) * topk);
    u32 slot = 0;
    for (const Rank& source : ranks) {
      for (u32 t = 0; t < c.tokens; ++t) {
        const i32* own = &source.host_indices[t * topk];
        if (std::none_of(own, own + topk, [&](i32 id) { return u32(id) / experts == d; })) continue;
        bad += slot >= received || std::memcmp(&rows[u64(slot) * c.row_bytes], &source.host_input[u64(t) * c.row_bytes], c.row_bytes) != 0;
        bad += slot >= received || std::memcmp(&ids[slot * topk], own, topk * 4) != 0;
        ++slot;
      }
    }
    bad += slot != received;
    const auto out = region<u8>(d, RegionId::combine_rows, u64(c.tokens) * c.row_bytes);
    for (u32 t = 0; t < c.tokens; ++t) {
      const i32* own = &ranks[d].host_indices[t * topk];
      u32 destinations = 0;
      for (u32 p = 0; p < world; ++p) destinations += std::any_of(own, own + topk, [&](i32 id) { return u32(id) / experts == p; });
      for (u32 e = 0; e + 1 < c.row_bytes; e += 2) {
        const float expected = value(&ranks[d].host_input[u64(t) * c.row_bytes + e]) * float(destinations);
        if (value(&out[u64(t) * c.row_bytes + e]) != expected) {
          ++bad;
          break;
        }
      }
    }
  }
  return bad;
}

// Where the time of one small call goes: ticks of block 0 at each point of both kernels, on rank 0.
void trace(u32 tokens) {
  const char* const names[] = {"entered", "counted", "announced", "heard", "copied", "arrived", "staged", "folded"};
  u64* buffer[world];
  for (u32 r = 0; r < world; ++r) {
    CHECK(cudaSetDevice(r));
    CHECK(cudaMalloc(reinterpret_cast<void**>(&buffer[r]), 2 * 1024 * sizeof(u64)));
  }
  vector<u64> host(u32(Point::count));
  for (int repeat = 0; repeat < 3; ++repeat) {
    for (u32 r = 0; r < world; ++r) {
      CHECK(cudaSetDevice(r));
      for (int i = 0; i < 20; ++i) {
        ranks[r].ep.profiler = buffer[r];
        const Case c{tokens, 2 * hidden, 8, 8, 7, false, false, false};
        launch_dispatch(ranks[r], c);
        ranks[r].ep.profiler = buffer[r] + 1024;
        launch_combine(ranks[r], c);
      }
      ranks[r].ep.profiler = nullptr;
    }
    for (u32 r = 0; r < world; ++r) CHECK(cudaStreamSynchronize(ranks[r].stream));
    CHECK(cudaSetDevice(0));
    for (int kernel = 0; kernel < 2; ++kernel) {
      CHECK(cudaMemcpy(host.data(), buffer[0] + 1024 * kernel, host.size() * 8, cudaMemcpyDeviceToHost));
      std::printf("%s %u tokens, ticks since entered:", kernel == 0 ? "dispatch" : "combine", tokens);
      for (u32 p = 1; p < u32(Point::count); ++p) {
        if (host[p] >= host[0]) std::printf(" %s %lld", names[p], static_cast<long long>(host[p] - host[0]));
      }
      std::printf("\n");
    }
  }
}

u32 parts_for(u32 tokens, u32 row_bytes, u32 blocks, u32 warps, u32 smallest) {
  const u32 most = std::max(1u, row_bytes / smallest);
  return std::max(1u, std::min(most, (blocks * warps + tokens - 1) / tokens));
}

}  // namespace

int main(int argc, char** argv) {
  set_up();
  vector<u32> sizes{4096, 1024, 512, 256, 128, 64, 16, 1};
  if (argc > 1) {
    sizes.clear();
    for (int i = 1; i < argc; ++i) sizes.push_back(u32(std::atoi(argv[i])));
  }
  if (MORI_TRACED != 0) trace(1), trace(64);
  for (const bool fp8 : {false, true}) {
    for (const u32 n : sizes) {
      const u32 row_bytes = fp8 ? hidden : 2 * hidden;
      double best[3] = {1e9, 1e9, 1e9};
      Case chosen[3];
      u64 bad = 0;
      for (const u32 blocks : {1u, 2u, 4u, 8u, 16u, 32u, 66u, 132u}) {
        for (const auto [warps, smallest] : {std::pair{8u, 2048u}, {16u, 2048u}, {8u, 512u}, {16u, 512u}}) {
          const u32 useful = u32(divide_up(u64(n) * std::max(1u, row_bytes / smallest), warps));
          if (smallest < 2048 && n > 128) continue;
          if (blocks > 2 * useful || (n >= 1024 && blocks < 32) || (n > 64 && blocks < 8)) continue;
          Case c{n, row_bytes, blocks, warps, parts_for(n, row_bytes, blocks, warps, smallest), true, fp8, false};
          const double dispatch = measure(c, c, Mode::dispatch);
          if (dispatch < best[0]) best[0] = dispatch, chosen[0] = c;
          c.weights = false;
          for (const u32 stagers : {0u, blocks, blocks / 2, blocks / 3, blocks / 6}) {
            c.external = stagers != 0;
            c.stagers = stagers;
            if (stagers == 0 && best[1] < 1e9 && c.external) continue;
            const double combine = measure(c, c, Mode::pair) - dispatch;
            const int slot = c.external ? 2 : 1;
            if (combine < best[slot]) best[slot] = combine, chosen[slot] = c;
          }
        }
      }
      // What a program gets that leaves the grid open.
      const Grid grid = choose_grid(n, row_bytes, 0, 0, 132, 32);
      Case open{n, row_bytes, grid.blocks, grid.warps, grid.parts, true, fp8, false, grid.stagers};
      double left_open[3] = {measure(open, open, Mode::dispatch)};
      open.weights = false;
      left_open[1] = measure(open, open, Mode::pair) - left_open[0];
      open.external = true;
      left_open[2] = measure(open, open, Mode::pair) - left_open[0];
      for (int slot = 0; slot < 3; ++slot) {
        chosen[slot].external = slot == 2;
        if (!fp8) bad += wrong(chosen[slot]);
      }
      std::printf("{\"dtype\": \"%s\", \"tokens\": %u, \"dispatch_us\": %.2f, \"grid\": \"%ux%u/%u\", \"combine_zero_copy_us\": %.2f, "
                  "\"combine_grid\": \"%ux%u/%u\", \"combine_external_us\": %.2f, \"external_grid\": \"%ux%u/%u\", \"stagers\": %u, \"left_open_us\": [%.2f, %.2f, %.2f], "
                  "\"wrong\": %llu}\n",
                  fp8 ? "fp8" : "bf16", n, best[0], chosen[0].blocks, chosen[0].warps, chosen[0].parts, best[1], chosen[1].blocks,
                  chosen[1].warps, chosen[1].parts, best[2], chosen[2].blocks, chosen[2].warps, chosen[2].parts, chosen[2].stagers, left_open[0], left_open[1], left_open[2], bad);
      std::fflush(stdout);
    }
  }
}
