// out = a b for fp32 matrices: the products of few rows with a large matrix that experts consist of.
//
// The scheme is that of K. Goto and R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (ACM TOMS 34, 2008):
// a tile of `out` stays in registers while the depth is summed over; what it reads lies packed in the order of reading. Beyond
// it, for weights that are not in the cache: while one panel of b is multiplied, the next one is fetched; and a result that
// nobody reads soon (a weight's gradient) passes the cache. Rows may be gathered while they are packed, and GELU or its slope
// applied to a tile before it leaves the first cache. Threads, those of torch, share the panels. An element of `out` is summed
// in the same order whatever the number of rows and threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <immintrin.h>

namespace {

// A tile has ROWS x COLUMNS sums in registers, ROWS up to MAX_ROWS; a register holds LANES numbers.
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 2, MAX_ROWS = 14;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, VECTORS = 2, MAX_ROWS = 6;
#else
#error "without AVX2 torch's products are faster"
#endif
constexpr int COLUMNS = VECTORS * LANES;
constexpr long MAX_DEPTH = 512;          // summed at once: a panel of b stays in the second cache
constexpr long MAX_BLOCK_ROWS = 2048;    // of a, packed at once
constexpr long WORTH_THREADS = 1 << 20;  // multiplications
constexpr long LINE = 64;                // bytes that come into the cache together

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Half __attribute__((vector_size(2 * LANES), aligned(4), may_alias));

Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
void store(float* to, Vector vector) { *reinterpret_cast<Unaligned*>(to) = vector; }

// Writes a vector without reading its place into the cache; `to` is aligned.
void stream(float* to, Vector vector) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, vector);
#else
    _mm256_stream_ps(to, vector);
#endif
}

// One factor, as lines of numbers that lie side by side. The depth is what the product sums over: `along_depth`, there is a line
// for each row of a, or column of b, else for each depth. `order`: which lines, null for all in turn.
struct Factor {
    const float* at;
    long stride;
    bool along_depth;
    const std::int64_t* order;

    const float* line(long i) const { return at + (order ? order[i] : i) * stride; }
};

// What comes into the cache during a tile: for each depth one of the two lines of the cache that it takes in a panel of b.
struct Ahead {
    const char* at;  // null: nothing
    long inner, outer, mask, shift;
    long other;  // from one of the two to the other; 0: only one

    const char* line(long k) const { return at + (k & mask) * inner + (k >> shift) * outer; }
};

enum class Result { overwrite, add, stream };

// out[ROWS, COLUMNS] = or += a^T b, a [depth, ROWS] and b [depth, COLUMNS] packed.
template <int ROWS>
void tile(long depth, const float* a, const float* b, float* out, long stride, Result result, Ahead ahead) {
    Vector sums[ROWS][VECTORS] = {};
    if (result != Result::stream)
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; c += LANES) __builtin_prefetch(out + r * stride + c, 1);
    for (long k = 0; k < depth; ++k, a += ROWS, b += COLUMNS) {
        if (ahead.at) {
            // To the second cache: in the first one rows that lie a power of two apart would displace each other.
            __builtin_prefetch(ahead.line(k), 0, 2);
            if (ahead.other) __builtin_prefetch(ahead.line(k) + ahead.other, 0, 2);
        }
        Vector columns[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) columns[v] = load(b + v * LANES);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[r][v] += a[r] * columns[v];
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r, out += stride)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            float* const to = out + v * LANES;
            if (result == Result::stream) stream(to, sums[r][v]);
            else store(to, result == Result::add ? load(to) + sums[r][v] : sums[r][v]);
        }
}

using Tile = void (*)(long, const float*, const float*, float*, long, Result, Ahead);

template <int... ROWS_LESS_1>
Tile tile_of(int rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr Tile TILES[] = {tile<ROWS_LESS_1 + 1>...};
    return TILES[rows - 1];
}

// Element i of the result is element ORDER(i) of `first`, or, from LANES on, ORDER(i) - LANES of `second`.
template <int (*ORDER)(int), int... I>
Vector mix(Vector first, Vector second, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(first, second, ORDER(I)...);
#else
    typedef int Order __attribute__((vector_size(4 * LANES)));
    return __builtin_shuffle(first, second, Order{ORDER(I)...});
#endif
}

template <int (*ORDER)(int)>
Vector mix(Vector first, Vector second) {
    return mix<ORDER>(first, second, std::make_integer_sequence<int, LANES>{});
}

// Within each four numbers, which is fast: one or two at a time in turns from both, of the lower or upper half.
template <int UPPER>
constexpr int singles(int i) { return i / 4 * 4 + UPPER * 2 + i % 4 / 2 + i % 2 * LANES; }
template <int UPPER>
constexpr int pairs(int i) { return i / 4 * 4 + UPPER * 2 + i % 2 + i % 4 / 2 * LANES; }
// Every other four numbers of the first, then of the second.
template <int ODD>
constexpr int fours(int i) { return i * 2 / LANES * LANES + (i / 4 * 2 + ODD) * 4 % LANES + i % 4; }

// to[k * to_stride + i] = number k0 + k of line i0 + i, for k < LANES, i < count, and 0 for count <= i < LANES.
void transpose(const Factor& from, long i0, long k0, int count, float* to, long to_stride) {
    Vector rows[LANES], mixed[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) rows[i] = i < count ? load(from.line(i0 + i) + k0) : Vector{};
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {  // column 4 n + c of four rows comes to vector c, place n
        const Vector low = mix<singles<0>>(rows[i], rows[i + 1]), low_next = mix<singles<0>>(rows[i + 2], rows[i + 3]);
        const Vector high = mix<singles<1>>(rows[i], rows[i + 1]), high_next = mix<singles<1>>(rows[i + 2], rows[i + 3]);
        mixed[i] = mix<pairs<0>>(low, low_next);
        mixed[i + 1] = mix<pairs<1>>(low, low_next);
        mixed[i + 2] = mix<pairs<0>>(high, high_next);
        mixed[i + 3] = mix<pairs<1>>(high, high_next);
    }
#pragma GCC unroll 2
    for (int half = LANES / 2; half > 2; half /= 2) {  // then the fours
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; ++i) {
            const int first = i / 4 * 8 + i % 4;
            rows[i] = mix<fours<0>>(mixed[first], mixed[first + 4]);
            rows[i + LANES / 2] = mix<fours<1>>(mixed[first], mixed[first + 4]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) mixed[i] = rows[i];
    }
#pragma GCC unroll 16
    for (int k = 0; k < LANES; ++k) store(to + k * to_stride, mixed[k]);
}

// packed[k * width + i] = depth k0 + k of row (or column) i0 + i, 0 for count <= i < width. Writes up to LANES numbers more.
void pack(const Factor& from, long i0, long k0, int count, int width, long depth, float* packed) {
    long k = 0;
    if (from.along_depth) {
        for (; k + LANES <= depth; k += LANES)
            for (int i = 0; i < width; i += LANES)
                transpose(from, i0 + i, k0 + k, std::clamp(count - i, 0, LANES), packed + k * width + i, width);
        for (; k < depth; ++k)
            for (int i = 0; i < width; ++i) packed[k * width + i] = i < count ? from.line(i0 + i)[k0 + k] : 0;
        return;
    }
    const auto copy_half = [](const float* source, float* to) {
        *reinterpret_cast<Half*>(to) = *reinterpret_cast<const Half*>(source);
    };
    for (; k < depth; ++k, packed += width) {
        const float* const line = from.line(k0 + k) + i0;
        if (count == COLUMNS) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) store(packed + v * LANES, load(line + v * LANES));
        } else if (count == width && LANES / 2 <= count && count <= LANES) {
            copy_half(line, packed);
            copy_half(line + count - LANES / 2, packed + count - LANES / 2);
        } else {
            for (int i = 0; i < width; ++i) packed[i] = i < count ? line[i] : 0;
        }
    }
}

// exp(x) for x <= 0: a power of two times a polynomial of the rest, whose coefficients are those of Cephes (S. Moshier).
inline float exp_of_negative(float x) {
    const bool vanishes = x < -87;
    x = vanishes ? -87 : x;
    constexpr float ROUND = 1.5f * (1 << 23);
    const float n = (x * 1.44269504f + ROUND) - ROUND, rest = x - n * 0.693359375f + n * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = sum * rest + next;
    const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return vanishes ? 0 : (sum * rest * rest + rest + 1) * power;
}

// The part of the normal distribution below x, with `bell` = exp(-x^2 / 2), to 1e-7 (Abramowitz and Stegun 1964, 7.1.26).
inline float part_below(float x, float bell) {
    const float t = 1 / (1 + 0.3275911f * 0.70710678f * std::fabs(x));
    float sum = 1.061405429f;
    for (const float next : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = sum * t + next;
    const float tail = 0.5f * bell * t * sum;
    return x < 0 ? tail : 1 - tail;
}

// gelu(x) = x times the part below x, and its slope.
inline float gelu(float x) { return x * part_below(x, exp_of_negative(-0.5f * x * x)); }
inline float gelu_slope(float x) {
    const float bell = exp_of_negative(-0.5f * x * x);
    return part_below(x, bell) + 0.39894228f * x * bell;
}

// Room for packed numbers, kept by each thread.
class Room {
public:
    float* get(long numbers) {
        if (numbers > size_) {
            memory_.reset(static_cast<float*>(std::aligned_alloc(LINE, (4 * numbers / LINE + 1) * LINE)));
            size_ = memory_ ? numbers : 0;
        }
        return memory_.get();
    }

private:
    std::unique_ptr<float, decltype(&std::free)> memory_{nullptr, &std::free};
    long size_ = 0;
};

thread_local Room room_a, room_b;

long parts(long whole, long most) { return std::max(1L, (whole + most - 1) / most); }

struct Product {
    long rows, columns, depth;
    Factor a, b;
    float* out;
    long stride;
    bool streams;
    const float* slope_at;  // null, or laid out as `out`: sums are multiplied by the slope of GELU at these numbers
    float* gelu_to;         // null, or laid out as `out`: gets the GELU of the sums; with slope_at, of its numbers
    float* packed;          // a: [depth, ROWS] per tile, LANES numbers between tiles

    // out = all of a b. All threads enter; each has its own `panel` for b: [depth, COLUMNS].
    void run(float* panel) const {
        const long deep = parts(parts(depth, parts(depth, MAX_DEPTH)), LANES) * LANES;
        const bool aligned = reinterpret_cast<std::uintptr_t>(out) % sizeof(Vector) == 0 && stride % LANES == 0;
        const Result once = streams && aligned && deep >= depth ? Result::stream : Result::overwrite;
        for (long i = 0; i < rows; i += MAX_BLOCK_ROWS)
            for (long k = 0; k == 0 || k < depth; k += deep)  // once for a depth of 0: zeros
                block(i, std::min(MAX_BLOCK_ROWS, rows - i), k, std::min(deep, depth - k), k == 0 ? once : Result::add,
                      panel);
        if (once == Result::stream) _mm_sfence();  // before another thread is told that it is done
    }

    // Rows i0 to i0 + size of a times b, both from depth k0 to k0 + deep.
    void block(long i0, long size, long k0, long deep, Result result, float* panel) const {
        const long tiles = parts(size, MAX_ROWS);
        const auto first = [=](long t) { return t * size / tiles; };  // tiles as equal as can be
        const auto a_tile = [=](long t) { return packed + first(t) * deep + t * LANES; };
        const bool finished = k0 + deep >= depth, goes_on = finished && (slope_at || gelu_to);
#pragma omp for schedule(static)
        for (long t = 0; t < tiles; ++t) {
            const int height = first(t + 1) - first(t);
            pack(a, i0 + first(t), k0, height, height, deep, a_tile(t));
        }
#pragma omp for schedule(static)
        for (long j = 0; j < columns; j += COLUMNS) {
            const int width = std::min<long>(COLUMNS, columns - j);
            const bool another = j + 2 * COLUMNS <= columns;
            pack(b, j, k0, width, COLUMNS, deep, panel);
            for (long t = 0; t < tiles; ++t) {
                const int height = first(t + 1) - first(t);
                const Tile multiply = tile_of(height, std::make_integer_sequence<int, MAX_ROWS>{});
                const Ahead ahead = another ? next_lines(j + COLUMNS, k0, t, tiles) : Ahead{};
                const long place = (i0 + first(t)) * stride + j;
                if (width == COLUMNS && !goes_on) {
                    multiply(deep, a_tile(t), panel, out + place, stride, result, ahead);
                    continue;
                }
                // What GELU reads or writes comes into the cache during the tile. (GCC leaves out functions that only fetch.)
                for (const float* beside : {slope_at, static_cast<const float*>(gelu_to)})
                    for (int r = 0; goes_on && beside && r < height; ++r)
                        for (int c = 0; c < width; c += LANES) __builtin_prefetch(beside + place + r * stride + c);
                alignas(Vector) float sums[MAX_ROWS * COLUMNS];
                multiply(deep, a_tile(t), panel, sums, COLUMNS, Result::overwrite, ahead);
                if (width == COLUMNS) finish(sums, place, height, std::integral_constant<int, COLUMNS>{}, result, goes_on);
                else finish(sums, place, height, width, result == Result::add ? result : Result::overwrite, goes_on);
            }
        }
    }

    // What tile t fetches of the panel from column j and depth k0 on: one of the lines each of the first two, so that memory keeps
    // up; both if it is the only one.
    Ahead next_lines(long j, long k0, long t, long tiles) const {
        if (t > 1 || b.order) return {};
        const long line = 4 * b.stride, other = b.along_depth ? line : LINE;
        const char* const at = reinterpret_cast<const char*>(b.along_depth ? b.line(j) + k0 : b.line(k0) + j) + t * other;
        constexpr long PAIRS = COLUMNS / 2;  // of lines, of each so many numbers as one line of the cache has
        if (b.along_depth) return {at, 2 * line, LINE, PAIRS - 1, __builtin_ctzl(PAIRS), tiles == 1 ? other : 0};
        return {at, 0, line, 0, 0, tiles == 1 ? other : 0};
    }

    // Takes a tile's sums [height, COLUMNS], or the `width` columns of them that `out` has, to their place.
    template <typename Width>
    void finish(float* sums, long place, int height, Width width, Result result, bool goes_on) const {
        for (int r = 0; r < height; ++r, sums += COLUMNS, place += stride) {
            float* const to = out + place;
            if (result == Result::add)
                for (int c = 0; c < width; ++c) sums[c] += to[c];
            const float* const x = slope_at ? slope_at + place : sums;
            if (goes_on && gelu_to)
                for (int c = 0; c < width; ++c) gelu_to[place + c] = gelu(x[c]);
            if (goes_on && slope_at)
                for (int c = 0; c < width; ++c) sums[c] *= gelu_slope(x[c]);
            if (result == Result::stream)
                for (int c = 0; c < width; c += LANES) stream(to + c, load(sums + c));
            else
                std::copy_n(sums, static_cast<int>(width), to);
        }
    }
};

}  // namespace

// out[rows, columns], its rows `stride` apart, = a[rows, depth] b[depth, columns]. Of each factor: where its first line begins,
// how far apart lines are, whether they lie along the depth, and which lines are meant (see Factor). Strides count numbers.
// `streams`: out is not read soon; `slope_at`, `gelu_to`: see Product. Returns 0, or 1 without memory for the packed numbers.
extern "C" int multiply(long rows, long columns, long depth,
                        const float* a, long a_stride, int a_along_depth, const std::int64_t* a_order,
                        const float* b, long b_stride, int b_along_depth, const std::int64_t* b_order,
                        float* out, long stride, int streams, const float* slope_at, float* gelu_to) {
    const long deepest = std::min(depth, MAX_DEPTH);
    float* const packed = room_a.get(std::min(rows, MAX_BLOCK_ROWS) * (deepest + LANES) + LANES);
    const Product product{rows, columns, depth, {a, a_stride, a_along_depth != 0, a_order},
                          {b, b_stride, b_along_depth != 0, b_order}, out, stride, streams != 0, slope_at, gelu_to, packed};
    bool missing = !packed;
#pragma omp parallel if (rows * columns * depth >= WORTH_THREADS)
    {
        float* const panel = room_b.get(COLUMNS * deepest + LANES);
        if (!panel) {
#pragma omp atomic write
            missing = true;
        }
#pragma omp barrier
        if (!missing) product.run(panel);
    }
    return missing;
}
