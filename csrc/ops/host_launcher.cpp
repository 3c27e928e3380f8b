#include "../runtime/host_grid.hpp"
#include "launcher.hpp"

namespace mori {
namespace {

// Rows that bypass the cache save the reading of their destination lines, but are far away for who reads them
// next; worth it once a call moves more than the caches hold anyway. Measured in benchmarks/NOTES.md.
constexpr u64 streaming_threshold_bytes = 4ull << 20;

constexpr u32 smallest_part_bytes = 2048;  // of a row; less is not worth a thread's while

// Work items per token: threads without a token of their own share the row of another's.
u32 parts_of(u32 tokens, u32 row_bytes, u32 threads) {
  if (tokens == 0 || tokens >= threads) return 1;
  return smaller(larger<u32>(1, row_bytes / smallest_part_bytes), u32(divide_up(threads, tokens)));
}

class HostLauncher final : public Launcher {
 public:
  explicit HostLauncher(const HostOptions& options)
      : threads_(mori_host::select_variant(options.isa.c_str()), options.threads, options.spin_ns) {}

  void load(KernelId, const std::string&) override {}  // all are in the extension
  bool synchronous() const override { return true; }
  // Whatever grid was asked for, the threads of the pool run it, one warp of one lane each.
  Grid grid(u32 tokens, u32 row_bytes, int, int) const override {
    const u32 threads = threads_.threads();
    return {threads, 1, parts_of(tokens, row_bytes, threads), threads};
  }
  bool streams(u64 bytes) const override { return bytes > streaming_threshold_bytes; }
  void run(KernelId kernel, const void* args, const Grid&, u64 scratch_bytes, u64) override {
    threads_.run(unsigned(kernel), args, scratch_bytes);
  }
  bool capturing(u64) const override { return false; }
  std::string description() const override {
    return std::string(threads_.variant_name()) + ", " + std::to_string(threads_.threads()) + " threads";
  }

 private:
  HostGrid threads_;
};

}  // namespace

std::shared_ptr<Launcher> make_host_launcher(const HostOptions& options) {
  return std::make_shared<HostLauncher>(options);
}

}  // namespace mori
