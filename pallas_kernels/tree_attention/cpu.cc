// Attention of tree rows over a committed prefix (cache) and the rows themselves, order-true: the result of a row is a
// function of its query and of the ordered list of the keys it sees (cache slots, then its visible new rows), and of
// nothing else. Not of the split of that list between cache and new rows, the other rows, the batch, the capacity, the
// threads or the vector width:
//   score   16 partial sums over h (lane l takes h = l, l + 16, ... with FMA), folded by halves 8, 4, 2, 1; * scale
//   max     exact in any order
//   p       exp(score - max), one instruction sequence for every key
//   total   16 partial sums over the list (lane = index mod 16), folded by halves 8, 4, 2, 1
//   output  one accumulator per lane of h, FMA over the list from left to right; divided by total
// A key that a row does not see is not in its list: it is never multiplied by zero, so a NaN or an infinity reaches
// only the rows that see it. Slots at or after the length are not read.
#include <cstdlib>
#include <limits>
#include <memory>

#include "tree_attention/kernel.h"

#include "cpu_math.h"

namespace jetspec {
namespace {

constexpr int kWide = 16;  // lanes of the fixed, virtual vector; a multiple of kLanes
constexpr int kParts = kWide / kLanes;
constexpr int kMaxColumns = 4;  // vectors of h accumulated at once
#if JETSPEC_FORM == 3 || JETSPEC_FORM == 1
constexpr int kTileRows = 6;
#elif JETSPEC_FORM == 2
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 2;
#endif
constexpr int kValueBlock = 64;            // keys whose values are shared by all row tiles: 16 KB at h = 64
constexpr size_t kScoreFloats = 96 << 10;  // scores kept per unit of work: 384 KB, a part of L2
constexpr int kSplitRows = 12;             // fewer rows per unit than this do not pay for reading K and V again
constexpr double kSerialCost = 24e3;       // estimated cycles up to which the calling thread works alone

// ---- Elements ------------------------------------------------------------------------------------------------------
struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}
inline Vec fetch(const float* p) { return load(p); }
inline Vec fetch(const Bf16* p) {
#if JETSPEC_FORM == 3
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#elif JETSPEC_FORM == 2
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#else
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = widen(p[i]);
  return load(wide);
#endif
}
inline void narrow(float x, float* y) { *y = x; }
inline void narrow(float x, Bf16* y) {  // to nearest, ties to even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  y->bits = x != x ? static_cast<uint16_t>((bits >> 16) | 0x40)
                   : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// ---- 16 lanes ------------------------------------------------------------------------------------------------------
struct Wide {
  Vec part[kParts];
};

inline float fold_halves(const float* lane) {
  float eight[8], four[4];
  for (int i = 0; i < 8; ++i) eight[i] = lane[i] + lane[i + 8];
  for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// out[i] = fold of a[i], for 16 vectors. Addition commutes, so each vector is folded by the same sums in every lane.
inline void fold16(const Wide (&a)[kWide], float* out, float scale) {
#if JETSPEC_FORM == 3
  const __m512i by8 = _mm512_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
  const __m512i by4 = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  const __m512i by1 = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
  Vec b[8], c[4], d[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Vec x = a[i].part[0], y = a[i + 8].part[0];
    b[i] = _mm512_mask_blend_ps(0xFF00, x, y) + _mm512_permutex2var_ps(x, by8, y);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    c[i] = _mm512_mask_blend_ps(0xF0F0, b[i], b[i + 4]) + _mm512_permutex2var_ps(b[i], by4, b[i + 4]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    d[i] = _mm512_mask_blend_ps(0xCCCC, c[i], c[i + 2]) + _mm512_shuffle_ps(c[i], c[i + 2], 0x4E);
  const Vec e = _mm512_mask_blend_ps(0xAAAA, d[0], d[1]) + _mm512_permutex2var_ps(d[0], by1, d[1]);
  store(out, e * splat(scale));
#elif JETSPEC_FORM == 2
  for (int i = 0; i < kWide; i += 4) {
    __m128 four[4];
    for (int j = 0; j < 4; ++j) {
      const __m256 eight = a[i + j].part[0] + a[i + j].part[1];
      four[j] = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    }
    const __m128 x = _mm_movelh_ps(four[0], four[1]) + _mm_movehl_ps(four[1], four[0]);
    const __m128 y = _mm_movelh_ps(four[2], four[3]) + _mm_movehl_ps(four[3], four[2]);
    const __m128 sum = _mm_shuffle_ps(x, y, 0x88) + _mm_shuffle_ps(x, y, 0xDD);
    _mm_storeu_ps(out + i, sum * _mm_set1_ps(scale));
  }
#else
  for (int i = 0; i < kWide; ++i) {
    float lane[kWide];
    for (int part = 0; part < kParts; ++part) store(lane + part * kLanes, a[i].part[part]);
    out[i] = fold_halves(lane) * scale;
  }
#endif
}

// ---- Scores --------------------------------------------------------------------------------------------------------
// Scores of 16 keys. key(i) points at the h elements of the i-th, padded to a multiple of 16.
// C: steps of 16 when known to the compiler, else 0. The sums are the same either way.
template <int C, typename Key>
inline void score16(const float* q, int steps, const Key& key, float scale, float* out) {
  Wide sums[kWide];
  const int count = C > 0 ? C : steps;
  for (int part = 0; part < kParts; ++part) {
    const int at = part * kLanes;
    const Vec first = load(q + at);
#pragma GCC unroll 16
    for (int i = 0; i < kWide; ++i) sums[i].part[part] = first * fetch(key(i) + at);
#pragma GCC unroll 8
    for (int c = 1; c < count; ++c) {
      const Vec query = load(q + c * kWide + at);
#pragma GCC unroll 16
      for (int i = 0; i < kWide; ++i)
        sums[i].part[part] = fma(query, fetch(key(i) + c * kWide + at), sums[i].part[part]);
    }
  }
  fold16(sums, out, scale);
}

// Scores of `count` keys for `rows` queries: the first `count`, or those named in `list`. A last block that is not
// full repeats its last key instead of reading on.
template <int C, typename E>
void score_rows(const float* q, int rows, int padded, const E* k, const int* list, int count, float scale, float* out,
                size_t stride) {
  const int width = C > 0 ? C * kWide : padded;
  for (int j = 0; j < count; j += kWide) {
    const E* block = k + static_cast<size_t>(j) * width;
    const E* keys[kWide];
    const bool direct = list == nullptr && j + kWide <= count;
    if (!direct)
      for (int i = 0; i < kWide; ++i) {
        const int at = std::min(j + i, count - 1);
        keys[i] = k + static_cast<size_t>(list ? list[at] : at) * width;
      }
    for (int r = 0; r < rows; ++r) {
      const float* query = q + static_cast<size_t>(r) * width;
      if (direct) {
        score16<C>(query, width / kWide, [=](int i) { return block + i * width; }, scale, out + r * stride + j);
      } else {
        score16<C>(query, width / kWide, [&](int i) { return keys[i]; }, scale, out + r * stride + j);
      }
    }
  }
}

// ---- Weighted values -----------------------------------------------------------------------------------------------
// acc[r][..] += p[r][j] * v[j] for j = 0 .. count - 1 in this order. list: which value is the j-th, or null.
template <int R, int C, typename E>
void values(const float* p, size_t stride, const E* v, const int* list, int count, int padded, float* acc) {
  Vec a[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) a[r][c] = load(acc + static_cast<size_t>(r) * padded + c * kLanes);
  for (int j = 0; j < count; ++j) {
    const E* value = v + static_cast<size_t>(list ? list[j] : j) * padded;
    Vec b[C];
    for (int c = 0; c < C; ++c) b[c] = fetch(value + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec s = splat(p[r * stride + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) a[r][c] = fma(s, b[c], a[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(acc + static_cast<size_t>(r) * padded + c * kLanes, a[r][c]);
}

template <int R, typename E>
void values_columns(const float* p, size_t stride, const E* v, const int* list, int count, int padded, float* acc) {
  int c = 0;
  for (; c + kMaxColumns * kLanes <= padded; c += kMaxColumns * kLanes)
    values<R, kMaxColumns>(p, stride, v + c, list, count, padded, acc + c);
  for (; c < padded; c += kLanes)
    for (int r = 0; r < R; ++r)
      values<1, 1>(p + r * stride, stride, v + c, list, count, padded, acc + static_cast<size_t>(r) * padded + c);
}

template <int R, typename E>
void values_tile(int rows, const float* p, size_t stride, const E* v, const int* list, int count, int padded,
                 float* acc) {
  if constexpr (R > 0) {
    if (rows == R) return values_columns<R>(p, stride, v, list, count, padded, acc);
    values_tile<R - 1>(rows, p, stride, v, list, count, padded, acc);
  }
}

template <typename E>
void values_rows(int rows, const float* p, size_t stride, const E* v, const int* list, int count, int padded,
                 float* acc) {
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int tile = 0, r = 0; tile < tiles; ++tile) {
    const int size = rows / tiles + (tile < rows % tiles);
    values_tile<kTileRows>(size, p + r * stride, stride, v, list, count, padded, acc + static_cast<size_t>(r) * padded);
    r += size;
  }
}

// ---- Softmax -------------------------------------------------------------------------------------------------------
// Turns the scores of one row into p in place and returns their total. s has room for a multiple of 16.
inline float softmax_row(float* s, int count) {
  const int end = (count + kWide - 1) / kWide * kWide;
  const float low = -std::numeric_limits<float>::infinity();
  for (int j = count; j < end; ++j) s[j] = low;  // p = +0: adding it changes nothing
  Vec top = splat(low);
  for (int j = 0; j < end; j += kLanes) top = vmax(top, load(s + j));
  float lane[kWide];
  store(lane, top);
  float most = low;
  for (int i = 0; i < kLanes; ++i) most = lane[i] > most ? lane[i] : most;
  const Vec shift = splat(most);
  Vec total[kParts];
  for (int part = 0; part < kParts; ++part) total[part] = zero();
  for (int j = 0; j < end; j += kWide)
    for (int part = 0; part < kParts; ++part) {
      float* at = s + j + part * kLanes;
      const Vec p = exp_negative(load(at) - shift);
      store(at, p);
      total[part] = total[part] + p;
    }
  for (int part = 0; part < kParts; ++part) store(lane + part * kLanes, total[part]);
  return fold_halves(lane);
}

// ---- One unit of work ----------------------------------------------------------------------------------------------
template <typename E>
using Job = AttentionJob<E>;

// Grows and never shrinks; one per thread.
struct Scratch {
  float* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  float* get(size_t floats) {
    if (floats > size) {
      std::free(data);
      size = (floats + 4095) / 4096 * 4096;
      data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
      if (data == nullptr) std::abort();
    }
    return data;
  }
};

// Copies keys or values to rows of `padded` elements, zeros behind `dim` (only for dim not a multiple of 16).
template <typename E>
void pad_rows(const E* from, int count, int dim, int padded, E* to) {
  for (int j = 0; j < count; ++j) {
    std::memcpy(to + static_cast<size_t>(j) * padded, from + static_cast<size_t>(j) * dim, dim * sizeof(E));
    std::memset(to + static_cast<size_t>(j) * padded + dim, 0, (padded - dim) * sizeof(E));
  }
}

template <typename E>
void attend(const Job<E>& job, int index) {
  const int part = index % job.blocks, pair = index / job.blocks;
  const int b = pair / job.heads;
  const int count_b = job.counts ? job.counts[b] : job.rows;
  const int t0 = part * job.block, t1 = std::min(count_b, t0 + job.block);
  if (t0 >= t1) return;
  const size_t first = job.first ? job.first[b] * job.row_stride : static_cast<size_t>(b) * job.sequence_stride;
  const size_t head0 = first + static_cast<size_t>(pair % job.heads) * job.group * job.head_stride;
  const int group = job.group, dim = job.dim, rows = (t1 - t0) * group;
  const int padded = (dim + kWide - 1) / kWide * kWide;
  const bool copy = padded != dim;
  const int live = job.lengths[b];
  const size_t stride = (static_cast<size_t>(live) + job.rows + kWide - 1) / kWide * kWide + kWide;

  static thread_local Scratch scratch;
  // Layout: queries, accumulators, scores, list, then (padded dims only) one block of rows and the new rows.
  const size_t wide_rows = static_cast<size_t>(rows) * padded;
  const size_t listed = (job.rows + kWide - 1) / kWide * kWide;
  const size_t copies = copy ? static_cast<size_t>(kValueBlock + 2 * job.rows) * padded : 0;
  float* q = scratch.get(2 * wide_rows + rows * stride + listed + copies);
  float* acc = q + wide_rows;
  float* scores = acc + wide_rows;
  int* list = reinterpret_cast<int*>(scores + rows * stride);
  E* spare = reinterpret_cast<E*>(list + listed);

  // Packed row order: all heads of the group beside each other, they see the same keys.
  for (int t = t0; t < t1; ++t)
    for (int g = 0; g < group; ++g) {
      const E* from = job.q + head0 + g * job.head_stride + t * job.row_stride;
      float* to = q + (static_cast<size_t>(t - t0) * group + g) * padded;
      for (int i = 0; i < dim; ++i) to[i] = widen(from[i]);
      for (int i = dim; i < padded; ++i) to[i] = 0.0f;
    }
  std::memset(acc, 0, wide_rows * sizeof(float));

  const E* cache_k = job.cache_k + static_cast<size_t>(pair) * job.capacity * dim;
  const E* cache_v = job.cache_v + static_cast<size_t>(pair) * job.capacity * dim;
  const E* new_k = job.new_k + static_cast<size_t>(pair) * job.rows * dim;
  const E* new_v = job.new_v + static_cast<size_t>(pair) * job.rows * dim;
  if (copy) {
    E* k = spare + static_cast<size_t>(kValueBlock) * padded;
    E* v = k + static_cast<size_t>(job.rows) * padded;
    pad_rows(new_k, job.rows, dim, padded, k);
    pad_rows(new_v, job.rows, dim, padded, v);
    new_k = k;
    new_v = v;
    for (int j = 0; j < live; j += kValueBlock) {
      const int count = std::min(kValueBlock, live - j);
      pad_rows(cache_k + static_cast<size_t>(j) * dim, count, dim, padded, spare);
      job.score_rows(q, rows, padded, spare, nullptr, count, job.scale, scores + j, stride);
    }
  } else {
    job.score_rows(q, rows, padded, cache_k, nullptr, live, job.scale, scores, stride);
  }

  // Scores of the new rows go right behind, so a row's scores are its visible list. `total` replaces the query.
  auto visible = [&](int t) {
    const uint8_t* seen = job.mask + (static_cast<size_t>(b) * job.rows + t) * job.rows;
    int count = 0;
    for (int j = 0; j < count_b; ++j) {
      list[count] = j;
      count += seen[j] != 0;
    }
    return count;
  };
  for (int t = t0; t < t1; ++t) {
    const int r = (t - t0) * group;
    const int count = visible(t);
    float* tail = scores + r * stride + live;
    const bool prefix = count > 0 && list[count - 1] == count - 1;
    job.score_rows(q + static_cast<size_t>(r) * padded, group, padded, new_k, prefix ? nullptr : list, count, job.scale,
                   tail, stride);
    for (int g = 0; g < group; ++g)
      q[static_cast<size_t>(r + g) * padded] = softmax_row(scores + (r + g) * stride, live + count);
  }

  const int step = rows <= kTileRows && padded <= kMaxColumns * kLanes && !copy ? std::max(1, live) : kValueBlock;
  for (int j = 0; j < live; j += step) {
    const int count = std::min(step, live - j);
    const E* v = cache_v + static_cast<size_t>(j) * dim;
    if (copy) {
      pad_rows(v, count, dim, padded, spare);
      v = spare;
    }
    values_rows(rows, scores + j, stride, v, nullptr, count, padded, acc);
  }
  for (int t = t0; t < t1; ++t) {
    const int r = (t - t0) * group;
    const int count = visible(t);
    const bool prefix = count > 0 && list[count - 1] == count - 1;
    values_rows(group, scores + r * stride + live, stride, new_v, prefix ? nullptr : list, count, padded,
                acc + static_cast<size_t>(r) * padded);
    for (int g = 0; g < group; ++g) {
      const float* from = acc + static_cast<size_t>(r + g) * padded;
      const float total = q[static_cast<size_t>(r + g) * padded];
      E* to = job.out + head0 + g * job.head_stride + t * job.row_stride;
      for (int i = 0; i < dim; ++i) narrow(live + count == 0 ? 0.0f : from[i] / total, to + i);
    }
  }
}

template <typename E>
typename Job<E>::ScoreRows find_score_rows(int steps) {
  if (steps == 4) return score_rows<4, E>;
  if constexpr (sizeof(E) == sizeof(float))
    if (steps == 8) return score_rows<8, E>;
  return score_rows<0, E>;
}

// Rows per unit: scores within their share of the cache, and enough units to keep the threads evenly busy.
template <typename E>
void plan(Job<E>& job, int threads) {
  int longest = 0, rows = job.counts ? 1 : job.rows;
  for (int b = 0; b < job.batch; ++b) {
    longest = std::max(longest, job.lengths[b]);
    if (job.counts) rows = std::max(rows, job.counts[b]);
  }
  const size_t per_row = static_cast<size_t>(longest) + job.rows + 2 * kWide;
  const size_t fit = std::max<size_t>(1, kScoreFloats / (per_row * job.group));
  const int pairs = job.batch * job.heads;
  const int least = (kSplitRows + job.group - 1) / job.group;
  const int wanted = 4 * std::max(1, threads);
  const int split = std::max(1, wanted / std::min(pairs, wanted));
  job.block = std::max(std::min(rows, least), (rows + split - 1) / split);
  job.block = static_cast<int>(std::min<size_t>(job.block, fit));
  job.blocks = (rows + job.block - 1) / job.block;
  job.score_rows = find_score_rows<E>((job.dim + kWide - 1) / kWide);
}

}  // namespace

void attention_plan(AttentionJob<float>& job, int threads) { plan(job, threads); }

int attention_tasks(const AttentionJob<float>& job) { return job.batch * job.heads * job.blocks; }

void attention_run(const AttentionJob<float>& job, int begin, int end) {
  for (int i = begin; i < end; ++i) attend(job, i);
}

namespace {

template <typename E, ffi::DataType D>
ffi::Error tree_attention(ffi::ThreadPool pool, ffi::Buffer<D> q, ffi::Buffer<D> cache_k, ffi::Buffer<D> cache_v,
                          ffi::Buffer<ffi::S32> lengths, ffi::Buffer<D> new_k, ffi::Buffer<D> new_v,
                          ffi::Buffer<ffi::PRED> mask, ffi::ResultBuffer<D> out, float scale, int64_t threads) {
  // Leading dimensions beyond the batch (vmap) are more batch.
  const auto qd = q.dimensions(), kd = cache_k.dimensions(), nd = new_k.dimensions();
  const size_t rank = qd.size();
  if (rank < 5 || kd.size() != rank - 1 || nd.size() != rank - 1 || mask.dimensions().size() != rank - 2)
    return ffi::Error::InvalidArgument("tree_attention: ranks do not fit");
  Job<E> job{reinterpret_cast<const E*>(q.untyped_data()),     reinterpret_cast<const E*>(cache_k.untyped_data()),
             reinterpret_cast<const E*>(cache_v.untyped_data()), reinterpret_cast<const E*>(new_k.untyped_data()),
             reinterpret_cast<const E*>(new_v.untyped_data()), lengths.typed_data(),
             reinterpret_cast<const uint8_t*>(mask.untyped_data()), reinterpret_cast<E*>(out->untyped_data())};
  job.batch = static_cast<int>(lengths.element_count());
  job.heads = static_cast<int>(qd[rank - 4]);
  job.group = static_cast<int>(qd[rank - 3]);
  job.rows = static_cast<int>(qd[rank - 2]);
  job.dim = static_cast<int>(qd[rank - 1]);
  job.capacity = static_cast<int>(kd[rank - 3]);
  job.scale = scale;
  job.row_stride = job.dim;
  job.head_stride = static_cast<size_t>(job.rows) * job.dim;
  job.sequence_stride = job.head_stride * job.heads * job.group;
  const size_t pairs = static_cast<size_t>(job.batch) * job.heads;
  if (q.element_count() != pairs * job.group * job.rows * job.dim || out->element_count() != q.element_count() ||
      cache_k.element_count() != pairs * job.capacity * job.dim || cache_v.element_count() != cache_k.element_count() ||
      new_k.element_count() != pairs * job.rows * job.dim || new_v.element_count() != new_k.element_count() ||
      mask.element_count() != static_cast<size_t>(job.batch) * job.rows * job.rows)
    return ffi::Error::InvalidArgument("tree_attention: shapes do not fit");
  if (q.element_count() == 0) return ffi::Error::Success();
  double keys = 0;
  for (int b = 0; b < job.batch; ++b) {
    if (job.lengths[b] < 0 || job.lengths[b] > job.capacity)
      return ffi::Error::InvalidArgument("tree_attention: length " + std::to_string(job.lengths[b]) + " of sequence " +
                                         std::to_string(b) + " is outside 0.." + std::to_string(job.capacity));
    keys += job.lengths[b] + job.rows;
  }

  plan(job, static_cast<int>(pool.num_threads()));
  // Per key, head and vector of h: about one cycle for the memory and one per row.
  const double cost = keys * job.heads * (job.dim + kWide - 1) / kWide * (job.group * job.rows + 1.0);
  const int limit = threads == 0 && cost < kSerialCost ? 1 : static_cast<int>(threads);
  parallel_for(pool, static_cast<int>(pairs) * job.blocks, limit, [&job](int begin, int end) {
    for (int i = begin; i < end; ++i) attend(job, i);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

#define JETSPEC_TREE_ATTENTION(NAME, ELEMENT, DTYPE)                                                          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(NAME, (jetspec::tree_attention<jetspec::ELEMENT, xla::ffi::DTYPE>),           \
                                xla::ffi::Ffi::Bind()                                                         \
                                    .Ctx<xla::ffi::ThreadPool>()                                              \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::S32>>()                                   \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()                                  \
                                    .Ret<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Attr<float>("scale")                                                     \
                                    .Attr<int64_t>("threads"))

namespace jetspec {
using Float = float;
}
JETSPEC_TREE_ATTENTION(TreeAttentionF32, Float, F32);
JETSPEC_TREE_ATTENTION(TreeAttentionBf16, Bf16, BF16);

// exp_negative for tests; count is a multiple of 16.
extern "C" void TreeAttentionExp(const float* x, float* y, int64_t count) {
  jetspec::FloatEnv env;
  for (int64_t i = 0; i < count; i += jetspec::kLanes)
    jetspec::store(y + i, jetspec::exp_negative(jetspec::load(x + i)));
}
