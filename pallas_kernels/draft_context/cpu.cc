// Drafter context of newly committed rows in one call: the tapped target states of the accepted path are fused (projected
// and normed) and every draft layer's keys (normed, rotated) and values of them are written to the tail of its cache, in
// place. Only the rows that are kept: sequence b has counts[b], row i of them is node path[b, i] at position start[b] + i.
#include <string>

#include "cpu_math.h"
#include "row_invariant_matmul/kernel.h"

namespace jetspec {
namespace {

struct Layer {
  const float* k_norm;
  MatmulJob kv;
  float *cache_k, *cache_v;
};

ffi::Error draft_context(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> taps, ffi::Buffer<ffi::S32> path,
                         ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> counts, ffi::Buffer<ffi::F32> inv_freq,
                         ffi::AnyBuffer fc, ffi::Buffer<ffi::F32> hidden_norm, ffi::RemainingArgs more,
                         ffi::RemainingRets results, int64_t layers, int64_t kv_heads, int64_t dim, int64_t capacity,
                         float eps, float rope_scale, ffi::Span<const int64_t> formats, int64_t threads) {
  const auto bad = [](const std::string& what) { return ffi::Error::InvalidArgument("draft_context: " + what); };
  const auto td = taps.dimensions(), pd = path.dimensions();
  if (td.size() != 4 || pd.size() != 2 || pd[0] != td[0]) return bad("taps are not [B, T, n, H]");
  const int batch = static_cast<int>(td[0]), nodes = static_cast<int>(td[1]), steps = static_cast<int>(pd[1]);
  const int depth = static_cast<int>(td[2] * td[3]), width = static_cast<int>(hidden_norm.element_count());
  const int kv_width = static_cast<int>(2 * kv_heads * dim);
  if (start.element_count() != pd[0] || counts.element_count() != pd[0] || dim < 2 || dim % 2 != 0 || dim > kMaxHeadDim ||
      inv_freq.element_count() != static_cast<size_t>(dim / 2) || static_cast<int64_t>(formats.size()) != layers + 1 ||
      fc.size_bytes() != matmul_weight_bytes(formats[0], depth, width))
    return bad("shapes do not fit");
  if (static_cast<int64_t>(more.size()) != 4 * layers || static_cast<int64_t>(results.size()) != 2 * layers)
    return bad("need two weights and two caches a layer");

  struct Row {
    int sequence, node, slot;
  };
  std::vector<Row> rows;
  for (int b = 0; b < batch; ++b) {
    const int64_t first = start.typed_data()[b], count = counts.typed_data()[b];
    if (count < 0 || count > steps || first < 0 || (count > 0 && first + count > capacity))
      return bad("sequence " + std::to_string(b) + " cannot write " + std::to_string(count) + " rows at slot " +
                 std::to_string(first) + " of " + std::to_string(capacity));
    for (int64_t i = 0; i < count; ++i) {
      const int node = path.typed_data()[b * steps + i];
      if (node < 0 || node >= nodes)
        return bad("path of sequence " + std::to_string(b) + " names row " + std::to_string(node) + " of " +
                   std::to_string(nodes));
      rows.push_back({b, node, static_cast<int>(first + i)});
    }
  }
  const size_t m = rows.size();
  float *x, *fused, *kv, *cosine, *sine, *split[2];  // split: rows as digits, by kind
  size_t split_size[2] = {};
  for (int64_t form : formats)
    if (const int kind = matmul_split_kind(form); kind != 0)
      split_size[kind - 1] = matmul_split_floats(m, std::max(depth, width));
  carve({{&x, m * depth}, {&fused, m * width}, {&kv, m * layers * kv_width}, {&cosine, m * dim / 2}, {&sine, m * dim / 2},
         {&split[0], split_size[0]}, {&split[1], split_size[1]}});

  const auto job = [m, &split](const float* from, const void* w, float* to, int in, int out, int64_t format, size_t stride) {
    MatmulJob job{from, static_cast<const uint8_t*>(w), to, nullptr, nullptr, static_cast<int>(m), in, out,
                  static_cast<int>(format), false, stride};
    const int kind = matmul_split_kind(format);
    if (kind != 0) job.split = reinterpret_cast<uint8_t*>(split[kind - 1]);
    return job;
  };
  const MatmulJob fuse = job(x, fc.untyped_data(), fused, depth, width, formats[0], width);
  const size_t cache = static_cast<size_t>(batch) * kv_heads * capacity * dim;
  Operands operands(more);
  std::vector<Layer> stack(layers);
  for (int64_t i = 0; i < layers; ++i) {
    Layer& layer = stack[i];
    const uint8_t* w = operands.bytes(matmul_weight_bytes(formats[1 + i], width, kv_width));
    layer.kv = job(fused, w, kv + i * kv_width, width, kv_width, formats[1 + i], layers * kv_width);
    layer.k_norm = operands.floats(dim);
  }
  for (int side = 0; side < 2; ++side)
    for (int64_t i = 0; i < layers; ++i) {
      const float* from = operands.floats(cache);
      const auto result = results.get<ffi::Buffer<ffi::F32>>(side * layers + i);
      if (from == nullptr || !result.has_value() || (*result)->element_count() != cache)
        return bad("a cache does not fit");
      float* to = (*result)->typed_data();
      // XLA gives the same buffer to both; where it does not, the result is a new cache.
      if (to != from) std::memcpy(to, from, cache * sizeof(float));
      (side == 0 ? stack[i].cache_k : stack[i].cache_v) = to;
    }
  if (operands.bad() != 0) return bad("operand " + std::to_string(operands.bad()) + " does not fit");
  if (m == 0) return ffi::Error::Success();

  int projections = 0;
  for (const Layer& layer : stack) projections += matmul_tasks(layer.kv);
  const int count = static_cast<int>(m);
  const double work = static_cast<double>(m) * width * (depth + static_cast<double>(layers) * kv_width);
  const int workers = threads == 0 && work < 4e5 ? 1 : worker_limit(pool, static_cast<int>(threads));
  run_phases(pool, {count, matmul_tasks(fuse), count, projections, count}, workers, [&](int phase, int begin, int end) {
    if (phase == 1) {
      matmul_run(fuse, begin, end);
      return;
    }
    if (phase == 3) {
      int at = 0;
      for (const Layer& layer : stack) {
        const int tasks = matmul_tasks(layer.kv), from = std::max(begin, at), to = std::min(end, at + tasks);
        if (from < to) matmul_run(layer.kv, from - at, to - at);
        at += tasks;
      }
      return;
    }
    for (int r = begin; r < end; ++r) {
      const Row row = rows[r];
      if (phase == 0) {
        std::memcpy(x + static_cast<size_t>(r) * depth,
                    taps.typed_data() + (static_cast<size_t>(row.sequence) * nodes + row.node) * depth, depth * sizeof(float));
        rope_angles(row.slot, inv_freq.typed_data(), dim / 2, rope_scale, cosine + r * (dim / 2), sine + r * (dim / 2));
        if (fuse.split != nullptr) matmul_split(fuse, r, r + 1);
      } else if (phase == 2) {
        float* to = fused + static_cast<size_t>(r) * width;
        rms_norm(to, hidden_norm.typed_data(), width, eps, to);
        bool done[3] = {true};  // of each kind once, for all layers
        for (const Layer& layer : stack) {
          bool& same = done[matmul_split_kind(layer.kv.format)];
          if (!same) matmul_split(layer.kv, r, r + 1);
          same = true;
        }
      } else {
        for (int64_t i = 0; i < layers; ++i) {
          const float* from = kv + (static_cast<size_t>(r) * layers + i) * kv_width;
          for (int64_t head = 0; head < kv_heads; ++head) {
            const size_t at = ((row.sequence * kv_heads + head) * capacity + row.slot) * dim;
            rotate(from + head * dim, stack[i].k_norm, cosine + r * (dim / 2), sine + r * (dim / 2), dim, eps,
                   stack[i].cache_k + at);
            std::memcpy(stack[i].cache_v + at, from + (kv_heads + head) * dim, dim * sizeof(float));
          }
        }
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(DraftContext, jetspec::draft_context,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("layers")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<int64_t>("dim")
                                  .Attr<int64_t>("capacity")
                                  .Attr<float>("eps")
                                  .Attr<float>("rope_scale")
                                  .Attr<xla::ffi::Span<const int64_t>>("formats")
                                  .Attr<int64_t>("threads"));
