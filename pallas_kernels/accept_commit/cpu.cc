// Writes the keys and values of an accepted path to the tail of the cache, in place: slot start[b] + i of sequence b gets
// row path[b, i] of the new rows, for i < counts[b]. One call for all layers and heads, and only the rows that are kept.
#include <string>

#include "cpu_common.h"

namespace jetspec {
namespace {

// Operands: 2 L caches [B, K, S, h], aliased with the results: keys of all layers, then values.
ffi::Error accept_commit(ffi::Buffer<ffi::F32> new_k, ffi::Buffer<ffi::F32> new_v, ffi::Buffer<ffi::S32> path,
                         ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> counts, ffi::RemainingArgs caches,
                         ffi::RemainingRets results) {
  const auto bad = [](const std::string& what) { return ffi::Error::InvalidArgument("accept_commit: " + what); };
  const auto nd = new_k.dimensions();
  const auto pd = path.dimensions();
  if (nd.size() != 5 || pd.size() != 2 || pd[0] != nd[1] || new_v.element_count() != new_k.element_count() ||
      start.element_count() != nd[1] || counts.element_count() != nd[1])
    return bad("rows, path, start and counts do not fit");
  const size_t layers = nd[0], batch = nd[1], heads = nd[2], rows = nd[3], dim = nd[4], steps = pd[1];
  if (caches.size() != 2 * layers || results.size() != 2 * layers) return bad("need keys and values of every layer");
  size_t capacity = 0;
  std::vector<float*> to;
  for (size_t i = 0; i < 2 * layers; ++i) {
    const auto from = caches.get<ffi::Buffer<ffi::F32>>(i);
    const auto result = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!from.has_value() || !result.has_value()) return bad("a cache is not float32");
    const auto cd = from->dimensions();
    if (cd.size() != 4 || static_cast<size_t>(cd[0]) != batch || static_cast<size_t>(cd[1]) != heads ||
        static_cast<size_t>(cd[3]) != dim || (*result)->element_count() != from->element_count())
      return bad("a cache does not fit the rows");
    if (i > 0 && static_cast<size_t>(cd[2]) != capacity) return bad("caches of different capacity");
    capacity = cd[2];
    to.push_back((*result)->typed_data());
    // XLA gives the same buffer to both; where it does not, the result is a new cache.
    if (to.back() != from->typed_data()) std::memcpy(to.back(), from->typed_data(), from->size_bytes());
  }
  for (size_t b = 0; b < batch; ++b) {
    const int64_t first = start.typed_data()[b], count = counts.typed_data()[b];
    if (count < 0 || count > static_cast<int64_t>(steps) || first < 0 || (count > 0 && first + count > static_cast<int64_t>(capacity)))
      return bad("sequence " + std::to_string(b) + " cannot write " + std::to_string(count) + " rows at slot " +
                 std::to_string(first) + " of " + std::to_string(capacity));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = path.typed_data()[b * steps + i];
      if (row < 0 || row >= static_cast<int64_t>(rows))
        return bad("path of sequence " + std::to_string(b) + " names row " + std::to_string(row) + " of " +
                   std::to_string(rows));
      for (size_t layer = 0; layer < layers; ++layer)
        for (size_t head = 0; head < heads; ++head) {
          const size_t from = (((layer * batch + b) * heads + head) * rows + row) * dim;
          const size_t at = ((b * heads + head) * capacity + first + i) * dim;
          std::memcpy(to[layer] + at, new_k.typed_data() + from, dim * sizeof(float));
          std::memcpy(to[layers + layer] + at, new_v.typed_data() + from, dim * sizeof(float));
        }
    }
  }
  return ffi::Error::Success();
}

// Results that nobody has written: memory fresh from the system takes no room until it is touched.
ffi::Error unwritten(ffi::RemainingRets) { return ffi::Error::Success(); }

}  // namespace
}  // namespace jetspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(AcceptCommit, jetspec::accept_commit,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(Unwritten, jetspec::unwritten, xla::ffi::Ffi::Bind().RemainingRets());
