// Times the CPU ops at the shapes of Qwen3.5-0.8B. Usage: bench_cpu_ops [op name prefix] [num_threads]; with one thread
// it counts CPU time. Prints the median and the best time of an op, and what the median reaches of a ceiling measured
// first: bytes against read bandwidth or flops against the FMA peak, whichever bound is the higher.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/ops/activation.h"
#include "cpp/src/ops/ceilings.h"
#include "cpp/src/ops/gated_delta_net.h"
#include "cpp/src/ops/kernels/isa.h"
#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/moe.h"
#include "cpp/src/ops/paged_attention.h"
#include "cpp/src/ops/rms_norm.h"

namespace deltaic::bench {
namespace {

constexpr std::int64_t kColdBytes = std::int64_t{96} << 20;  // more than a cache holds

struct Bench {
  std::string filter;
  ThreadPool threads;
  double bandwidth = 0.0, peak = 0.0;

  Bench(std::string prefix, int num_threads) : filter(std::move(prefix)), threads(num_threads) {
    bandwidth = cpu::measure_read_bandwidth(threads), peak = cpu::measure_fma_peak(threads);
    std::printf("%d threads, %s, read %.1f GB/s, FMA %.0f GFLOP/s\n", threads.num_threads(),
                std::string(cpu::name(cpu::active_isa())).c_str(), bandwidth, peak);
    std::printf("%-18s %-34s %10s %10s %8s %8s %7s\n", "op", "shape", "median us", "best us", "GB/s", "GFLOP/s",
                "share");
  }

  ops::Context ctx() { return {.device = {}, .stream = {}, .threads = &threads}; }

  // run(i) is the i-th repetition: it may use other memory each time.
  void time(const std::string& op, const std::string& shape, double bytes, double flops,
            const std::function<void(int)>& run) {
    if (!op.starts_with(filter)) return;
    run(0);
    std::vector<double> times;
    const cpu::Clock clock(threads);
    double total = 0.0;
    for (int i = 1; (total < 0.7 || times.size() < 5) && times.size() < 2000; ++i) {
      const double start = clock.seconds();
      run(i);
      times.push_back(clock.seconds() - start);
      total += times.back();
    }
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    const double bound = std::max(bytes * 1e-9 / bandwidth, flops * 1e-9 / peak);
    std::printf("%-18s %-34s %10.1f %10.1f %8.1f %8.0f %6.0f%%\n", op.c_str(), shape.c_str(), median * 1e6,
                times[0] * 1e6, bytes * 1e-9 / median, flops * 1e-9 / median, 100.0 * bound / median);
    std::fflush(stdout);
  }
  bool wants(const std::string& op) const { return op.starts_with(filter) || filter.starts_with(op); }
};

Tensor random(std::initializer_list<std::int64_t> shape, DType dtype) {
  Tensor tensor(dtype, shape);
  static std::mt19937 engine(1);
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  std::vector<float> some(4099);
  for (float& value : some) value = uniform(engine);
  char* data = static_cast<char*>(tensor.view().data);
  const std::int64_t count = tensor.view().numel(), period = static_cast<std::int64_t>(some.size());
  for (std::int64_t i = 0; i < count; i += period)
    cpu::kernels().narrow(cpu::float_type(dtype), some.data(), std::min(period, count - i),
                          data + i * static_cast<std::int64_t>(size_of(dtype)));
  return tensor;
}

std::string text(std::initializer_list<std::int64_t> shape) {
  std::string result;
  for (const std::int64_t size : shape) result += (result.empty() ? "" : " x ") + std::to_string(size);
  return result;
}

void bench_linear(Bench& bench) {
  struct Matrix {
    std::int64_t n, k;
  };
  if (!bench.wants("linear")) return;
  for (const auto [n, k] :
       {Matrix{6144, 1024}, {2048, 1024}, {16, 1024}, {1024, 2048}, {3584, 1024}, {1024, 3584}, {248320, 1024}}) {
    const std::int64_t bytes = n * k * 2, copies = std::max<std::int64_t>(1, kColdBytes / bytes);
    const Tensor weights = random({std::min<std::int64_t>(copies, 64) * n, k}, DType::bf16);
    const std::int64_t num_copies = weights.view().shape[0] / n;
    for (const std::int64_t m : {1, 2, 8, 32, 64, 512}) {
      if (n > 100000 && m > 32) continue;
      const Tensor x = random({m, k}, DType::f32), y(DType::f32, {m, n});
      const std::string op = n > 100000 ? "linear.lm_head" : "linear";
      bench.time(op, text({m, k, n}) + " bf16", static_cast<double>(bytes + 4 * m * (n + k)), 2.0 * m * n * k,
                 [&](int i) {
                   const std::int64_t copy = i % num_copies;
                   ops::linear(bench.ctx(), x.view(),
                               {.view = weights.view().slice(copy * n, (copy + 1) * n), .owner = nullptr}, y.view());
                 });
    }
  }
}

void bench_attention(Bench& bench) {
  const std::int64_t heads = 8, kv_heads = 2, dim = 256, block_size = 16;
  struct Case {
    std::int64_t num_reqs, query_len, seq_len;
  };
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const auto [num_reqs, query_len, seq_len] :
         {Case{1, 1, 1024}, {1, 1, 8192}, {8, 1, 1024}, {32, 1, 1024}, {1, 512, 512}, {1, 512, 4096}}) {
      if (!bench.wants("attention")) return;
      const std::int64_t blocks = seq_len / block_size, bytes = 4 * seq_len * kv_heads * dim;
      const std::int64_t copies = std::max<std::int64_t>(1, kColdBytes / (bytes * num_reqs));
      const Tensor k = random({copies * num_reqs * blocks, block_size, kv_heads, dim}, dtype);
      const Tensor v = random({copies * num_reqs * blocks, block_size, kv_heads, dim}, dtype);
      Tensor table(DType::i32, {copies * num_reqs, blocks}), lens(DType::i32, {num_reqs}),
          start(DType::i32, {num_reqs + 1});
      for (std::int64_t i = 0; i < copies * num_reqs * blocks; ++i)
        table.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
      for (std::int64_t i = 0; i < num_reqs; ++i) {
        lens.as<std::int32_t>()[i] = static_cast<std::int32_t>(seq_len);
        start.as<std::int32_t>()[i + 1] = static_cast<std::int32_t>((i + 1) * query_len);
      }
      const Tensor q = random({num_reqs * query_len, heads, dim}, DType::f32),
                   out(DType::f32, {num_reqs * query_len, heads, dim});
      const double pairs = static_cast<double>(query_len) * (static_cast<double>(seq_len) - query_len / 2.0 + 0.5);
      bench.time("attention", text({num_reqs, query_len, seq_len}) + " " + std::string(name(dtype)),
                 static_cast<double>(num_reqs * 2 * seq_len * kv_heads * dim) * static_cast<double>(size_of(dtype)),
                 4.0 * num_reqs * heads * dim * pairs, [&](int i) {
                   const std::int64_t copy = i % copies;
                   ops::paged_attention(bench.ctx(),
                                        {.q = q.view(),
                                         .k_cache = k.view(),
                                         .v_cache = v.view(),
                                         .block_table = table.view().slice(copy * num_reqs, (copy + 1) * num_reqs),
                                         .seq_lens = lens.view(),
                                         .query_start_loc = start.view(),
                                         .scale = 1.0F / 16.0F,
                                         .out = out.view()});
                 });
    }
}

void bench_gdn(Bench& bench) {
  struct Case {
    int value_heads;
    std::int64_t num_seqs, query_len;
  };
  for (const auto [value_heads, num_seqs, query_len] :
       {Case{16, 1, 1}, {16, 8, 1}, {16, 32, 1}, {16, 1, 512}, {32, 1, 512}}) {
    if (!bench.wants("gdn")) return;
    const ops::GdnShape shape{16, value_heads, 128, 128, 4};
    const std::int64_t qk = 2048, v = value_heads * 128, row = 2 * qk + 2 * v + 2 * value_heads,
                       r = shape.heads_per_group();
    const ops::GdnProjectionLayout layout{.q = 0,
                                          .q_stride = 128,
                                          .k = qk,
                                          .k_stride = 128,
                                          .v = 2 * qk,
                                          .v_group_stride = r * 128,
                                          .z = 2 * qk + v,
                                          .z_group_stride = r * 128,
                                          .b = 2 * qk + 2 * v,
                                          .b_group_stride = r,
                                          .a = 2 * qk + 2 * v + value_heads,
                                          .a_group_stride = r};
    const std::int64_t num_tokens = num_seqs * query_len, state_bytes = v * 128 * 4;
    const std::int64_t copies = query_len > 1 ? 1 : std::max<std::int64_t>(1, kColdBytes / (state_bytes * num_seqs));
    const Tensor proj = random({num_tokens, row}, DType::f32), weight = random({shape.conv_dim(), 4}, DType::f32);
    const Tensor A_log = random({value_heads}, DType::f32), dt_bias = random({value_heads}, DType::f32);
    const Tensor conv_state(DType::f32, {copies * num_seqs, shape.conv_dim(), 3});
    const Tensor temporal(DType::f32, {copies * num_seqs, value_heads, 128, 128});
    Tensor start(DType::i32, {num_seqs + 1}), slots(DType::i32, {copies * num_seqs}), initial(DType::u8, {num_seqs});
    for (std::int64_t i = 0; i <= num_seqs; ++i) start.as<std::int32_t>()[i] = static_cast<std::int32_t>(i * query_len);
    for (std::int64_t i = 0; i < copies * num_seqs; ++i) slots.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
    std::fill_n(initial.as<std::uint8_t>(), num_seqs, std::uint8_t{1});
    const Tensor conv(DType::f32, {num_tokens, shape.conv_dim()}), out(DType::f32, {num_tokens, value_heads, 128});
    const auto sequences = [&](int i) {
      const std::int64_t copy = i % copies;
      return ops::GdnSequences{.query_start_loc = start.view(),
                               .state_indices = slots.view().slice(copy * num_seqs, (copy + 1) * num_seqs),
                               .has_initial_state = initial.view()};
    };
    const std::string shape_text = text({num_seqs, query_len, value_heads, 128, 128});
    bench.time("gdn.conv", shape_text, static_cast<double>(num_tokens * shape.conv_dim() * 8),
               8.0 * num_tokens * shape.conv_dim(), [&](int i) {
                 ops::causal_conv(bench.ctx(), shape, layout, proj.view(), weight.view(), sequences(i),
                                  conv_state.view(), conv.view());
               });
    bench.time("gdn.delta_rule", shape_text, static_cast<double>(2 * num_seqs * state_bytes),
               8.0 * num_tokens * v * 128, [&](int i) {
                 ops::gated_delta_rule(bench.ctx(), shape, layout, conv.view(), proj.view(), A_log.view(),
                                       dt_bias.view(), sequences(i), temporal.view(), /*replay=*/{}, out.view());
               });
    const Tensor norm_weight = random({128}, DType::f32), normal = random({num_tokens, value_heads, 128}, DType::f32);
    TensorView z = proj.view();
    z.rank = 3, z.shape = {num_tokens, value_heads, 128}, z.stride = {row, 128, 1};
    z.data = proj.as<float>() + layout.z;
    bench.time("gdn.gated_norm", shape_text, static_cast<double>(num_tokens * v * 12), 0.0,
               [&](int) { ops::gated_rms_norm(bench.ctx(), out.view(), z, norm_weight.view(), 1e-6F, out.view()); });
  }
}

void bench_elementwise(Bench& bench) {
  for (const std::int64_t m : {1, 32, 512}) {
    const Tensor x = random({m, 1024}, DType::f32), weight = random({1024}, DType::f32), y(DType::f32, {m, 1024});
    bench.time("rms_norm", text({m, 1024}), static_cast<double>(m * 1024 * 8), 0.0,
               [&](int) { ops::rms_norm(bench.ctx(), x.view(), weight.view(), 1e-6F, y.view()); });
    const Tensor gate = random({m, 3584}, DType::f32), up = random({m, 3584}, DType::f32), h(DType::f32, {m, 3584});
    bench.time("silu_mul", text({m, 3584}), static_cast<double>(m * 3584 * 12), 0.0,
               [&](int) { ops::silu_mul(bench.ctx(), gate.view(), up.view(), h.view()); });
  }
}

// A layer of 64 experts, 8 a token, hidden 1024 and intermediate 256.
void bench_moe(Bench& bench) {
  if (!bench.wants("moe")) return;
  const std::int64_t num_experts = 64, k = 8, hidden = 1024, intermediate = 256;
  const Tensor gate_up = random({num_experts * 2 * intermediate, hidden}, DType::bf16);
  const Tensor down = random({num_experts * hidden, intermediate}, DType::bf16);
  ops::ExpertWeights experts;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const std::int64_t row = e * 2 * intermediate;
    experts.gate.push_back({.view = gate_up.view().slice(row, row + intermediate), .owner = nullptr});
    experts.up.push_back({.view = gate_up.view().slice(row + intermediate, row + 2 * intermediate), .owner = nullptr});
    experts.down.push_back({.view = down.view().slice(e * hidden, (e + 1) * hidden), .owner = nullptr});
  }
  for (const std::int64_t m : {1, 8, 32, 512}) {
    const Tensor x = random({m, hidden}, DType::f32), y(DType::f32, {m, hidden});
    const Tensor logits = random({m, num_experts}, DType::f32), ids(DType::i32, {m, k}), weights(DType::f32, {m, k});
    ops::moe_router(bench.ctx(), logits.view(), true, ids.view(), weights.view());
    std::vector<bool> used(static_cast<std::size_t>(num_experts));
    for (std::int64_t i = 0; i < m * k; ++i) used[static_cast<std::size_t>(ids.as<std::int32_t>()[i])] = true;
    const auto num_used = static_cast<double>(std::count(used.begin(), used.end(), true));
    const Tensor scratch(DType::u8, {static_cast<std::int64_t>(ops::moe_scratch_bytes(m, k, hidden, intermediate))});
    bench.time("moe.experts", text({m, k, num_experts, hidden, intermediate}), num_used * 6 * intermediate * hidden,
               6.0 * m * k * hidden * intermediate, [&](int) {
                 ops::moe_experts(bench.ctx(), x.view(), experts, ids.view(), weights.view(), scratch.view(), y.view());
               });
    bench.time("moe.router", text({m, num_experts}), static_cast<double>(m * num_experts * 4), 0.0,
               [&](int) { ops::moe_router(bench.ctx(), logits.view(), true, ids.view(), weights.view()); });
  }
}

}  // namespace
}  // namespace deltaic::bench

int main(int argc, char** argv) {
  using namespace deltaic::bench;
  Bench bench(argc > 1 ? argv[1] : "", argc > 2 ? std::atoi(argv[2]) : 0);
  bench_linear(bench);
  bench_moe(bench);
  bench_attention(bench);
  bench_gdn(bench);
  bench_elementwise(bench);
}
