/* Vectors of FT_LANES floats or 32-bit integers, one set of names for every variant.
 *
 * avx512 (with bf16 and VNNI) has 16 lanes, avx2 has 8. scalar has 4, in the compiler's generic
 * vectors, which become SSE2 or NEON; tests that need the panels of avx512 set FT_SCALAR_LANES to
 * 16. Results may differ between variants, never within one.
 *
 * Pairs and quads: a 32-bit lane of weights or activations holds 2 bf16 or 4 bytes that are
 * neighbours along K; a dot product adds the products of a lane to that lane of the sum.
 */
#ifndef FT_SIMD_H
#define FT_SIMD_H

#include "common.h"

#if defined(FT_SCALAR)
#elif defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define FT_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FT_AVX2 1
#endif

#if defined(FT_AVX512)
#include <immintrin.h>
enum { FT_LANES = 16 };
typedef __m512 vf;
typedef __m512i vi;

FT_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
FT_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
FT_INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
FT_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
FT_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
FT_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
FT_INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
FT_INLINE vf vf_fma(vf a, vf b, vf sum) { return _mm512_fmadd_ps(a, b, sum); }
FT_INLINE vf vf_from_vi(vi a) { return _mm512_cvtepi32_ps(a); }
FT_INLINE vi vi_round(vf a) { return _mm512_cvtps_epi32(a); } /* to nearest, ties to even */
FT_INLINE vf vf_load_bf16(const bf16 *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
FT_INLINE vf vf_load_fp16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
FT_INLINE vf vf_load_uint8(const void *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
FT_INLINE vf vf_load_int8(const void *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
FT_INLINE void vf_store_bf16(bf16 *p, vf x) {
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
}
FT_INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
FT_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
FT_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
FT_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
FT_INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
/* Shift the bits of every lane left by n, or right by -n if n is negative. */
FT_INLINE vi vi_moved(vi a, const int n) {
    return n < 0 ? _mm512_srli_epi32(a, (unsigned)-n) : _mm512_slli_epi32(a, (unsigned)n);
}
FT_INLINE vi vi_low_nibbles(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
FT_INLINE vi vi_high_nibbles(vi a) { return vi_low_nibbles(_mm512_srli_epi16(a, 4)); }
/* Look up every byte of `index` (0 to 15) in a table of 16 bytes. */
FT_INLINE vi vi_lookup(const uint8_t *table, vi index) {
    __m128i row = _mm_loadu_si128((const __m128i *)table);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), index);
}
FT_INLINE vf vf_dot_bf16(vf sum, vi w, vi x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
}
/* The first, or the second, bf16 of every pair, widened to float. */
FT_INLINE vf vf_even_bf16(vi pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
FT_INLINE vf vf_odd_bf16(vi pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int32_t)0xffff0000u)));
}
/* Add products of unsigned bytes w and signed bytes x; exact. */
FT_INLINE vi vi_dot_u8s8(vi sum, vi w, vi x) { /* gcc 12 copies the intrinsic's sums needlessly */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}
/* Add the products of two vectors of unsigned bytes (0 to 15) and the quad of signed bytes at x to
 * two sums, which vi_gathered reads. */
FT_INLINE void vi_gather_u4s8(vi *sum, vi left, vi right, const void *x) {
    vi quad = _mm512_set1_epi32(*(const int32_t *)x);
    sum[0] = vi_dot_u8s8(sum[0], left, quad);
    sum[1] = vi_dot_u8s8(sum[1], right, quad);
}
FT_INLINE vi vi_gathered(vi sum) { return sum; }
FT_INLINE vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
/* The maximum, or the sum, of all lanes. */
FT_INLINE int32_t vi_highest(vi a) { return _mm512_reduce_max_epi32(a); }
FT_INLINE int32_t vi_total(vi a) { return _mm512_reduce_add_epi32(a); }
/* Store the lowest byte of every lane. */
FT_INLINE void vi_store_bytes(void *p, vi a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a));
}

#elif defined(FT_AVX2)
#include <immintrin.h>
enum { FT_LANES = 8 };
typedef __m256 vf;
typedef __m256i vi;

FT_INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
FT_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
FT_INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
FT_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
FT_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
FT_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
FT_INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
FT_INLINE vf vf_fma(vf a, vf b, vf sum) { return _mm256_fmadd_ps(a, b, sum); }
FT_INLINE vf vf_from_vi(vi a) { return _mm256_cvtepi32_ps(a); }
FT_INLINE vi vi_round(vf a) { return _mm256_cvtps_epi32(a); }
FT_INLINE vf vf_load_bf16(const bf16 *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
FT_INLINE vf vf_load_fp16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
FT_INLINE vf vf_load_uint8(const void *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
FT_INLINE vf vf_load_int8(const void *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
FT_INLINE void vf_store_bf16(bf16 *p, vf x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}
FT_INLINE vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
FT_INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
FT_INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
FT_INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
FT_INLINE vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
FT_INLINE vi vi_moved(vi a, const int n) {
    return n < 0 ? _mm256_srli_epi32(a, -n) : _mm256_slli_epi32(a, n);
}
FT_INLINE vi vi_low_nibbles(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
FT_INLINE vi vi_high_nibbles(vi a) { return vi_low_nibbles(_mm256_srli_epi16(a, 4)); }
FT_INLINE vi vi_lookup(const uint8_t *table, vi index) {
    __m128i row = _mm_loadu_si128((const __m128i *)table);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(row), index);
}
FT_INLINE vf vf_even_bf16(vi pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
FT_INLINE vf vf_odd_bf16(vi pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int32_t)0xffff0000u)));
}
FT_INLINE vf vf_dot_bf16(vf sum, vi w, vi x) {
    sum = _mm256_fmadd_ps(vf_even_bf16(w), vf_even_bf16(x), sum);
    return _mm256_fmadd_ps(vf_odd_bf16(w), vf_odd_bf16(x), sum);
}
FT_INLINE vi vi_dot_u8s8(vi sum, vi w, vi x) { /* maddubs would saturate at 255 * 127 * 2 */
    vi even_x = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
    vi even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even_x);
    vi odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
/* Add the products of two vectors of weights and one broadcast group to two sums. From intrinsics,
 * gcc adds products to each other first and broadcasts the groups of all rows at once, which takes
 * more than 16 registers. */
#define FT_TWO_PRODUCTS(multiply, add, sum, left, right, x)                                    \
    do {                                                                                       \
        vi group, product;                                                                     \
        __asm__("vpbroadcastd %6, %2\n\t" multiply " %2, %4, %3\n\t" multiply " %2, %5, %2\n\t" \
                add " %3, %0, %0\n\t" add " %2, %1, %1"                                        \
                : "+x"((sum)[0]), "+x"((sum)[1]), "=&x"(group), "=&x"(product)                 \
                : "x"(left), "x"(right), "m"(*(const int32_t *)(x)));                          \
    } while (0)
/* The sums are 16-bit numbers until vi_gathered widens them: the 8 quads of a group add 8 * 2
 * products of at most 15 * 128 to each, which fits. */
FT_INLINE void vi_gather_u4s8(vi *sum, vi left, vi right, const void *x) {
    FT_TWO_PRODUCTS("vpmaddubsw", "vpaddw", sum, left, right, x);
}
FT_INLINE vi vi_gathered(vi sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
/* Bytes 0 and 2, or 1 and 3, of every lane as 16-bit numbers. */
FT_INLINE vi vi_even_bytes(vi a) { return _mm256_and_si256(a, _mm256_set1_epi16(255)); }
FT_INLINE vi vi_odd_bytes(vi a) { return _mm256_srli_epi16(a, 8); }
/* Add the products of two vectors of signed 16-bit pairs and the pair at x to two sums; exact. */
FT_INLINE void vi_dot_words(vi *sum, vi left, vi right, const void *x) {
    FT_TWO_PRODUCTS("vpmaddwd", "vpaddd", sum, left, right, x);
}
FT_INLINE vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
#define FT_FOLD_LANES(add, a)                                                       \
    __m128i four = add(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));  \
    four = add(four, _mm_shuffle_epi32(four, 0x4e));                                \
    return _mm_cvtsi128_si32(add(four, _mm_shuffle_epi32(four, 0xb1)))
FT_INLINE int32_t vi_highest(vi a) { FT_FOLD_LANES(_mm_max_epi32, a); }
FT_INLINE int32_t vi_total(vi a) { FT_FOLD_LANES(_mm_add_epi32, a); }
/* Store the low byte, or the low 16 bits, of every lane. The 16-bit numbers of each four lanes are
 * stored in the order 0, 2, 1, 3, to match vi_even_bytes and vi_odd_bytes of weights. */
FT_INLINE void vi_store_bytes(void *p, vi a) {
    vi four = _mm256_shuffle_epi8(a, _mm256_set1_epi32(0x0c080400));
    vi eight = _mm256_permutevar8x32_epi32(four, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    _mm_storel_epi64((__m128i *)p, _mm256_castsi256_si128(eight));
}
FT_INLINE void vi_store_words(void *p, vi a) {
    vi four = _mm256_shuffle_epi8(a, _mm256_set1_epi64x(0x0d0c050409080100));
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(four, 0x08)));
}

#else
#include <math.h>
#ifndef FT_SCALAR_LANES
#define FT_SCALAR_LANES 4
#endif
enum { FT_LANES = FT_SCALAR_LANES };
typedef float vf __attribute__((vector_size(4 * FT_SCALAR_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * FT_SCALAR_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * FT_SCALAR_LANES)));

#define FT_FOR_LANES(i) for (int i = 0; i < FT_LANES; i++)

FT_INLINE vf vf_set1(float x) { return x - (vf){0}; }
FT_INLINE vf vf_load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
FT_INLINE void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
FT_INLINE vf vf_add(vf a, vf b) { return a + b; }
FT_INLINE vf vf_mul(vf a, vf b) { return a * b; }
FT_INLINE vf vf_max(vf a, vf b) {
    vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
}
FT_INLINE vf vf_abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
FT_INLINE vf vf_fma(vf a, vf b, vf sum) { return sum + a * b; }
FT_INLINE vf vf_from_vi(vi a) { return __builtin_convertvector(a, vf); }
FT_INLINE vi vi_round(vf a) {
    FT_FOR_LANES(i) a[i] = nearbyintf(a[i]);
    return __builtin_convertvector(a, vi);
}
FT_INLINE vf vf_load_bf16(const bf16 *p) {
    vf x;
    FT_FOR_LANES(i) x[i] = ft_from_bf16(p[i]);
    return x;
}
FT_INLINE float ft_from_fp16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    float value = rest < 0x400u ? (float)rest * 0x1p-24f : 0.0f; /* zero and subnormals */
    uint32_t bits = rest < 0x7c00u ? (rest << 13) + 0x38000000u : (rest << 13) + 0x70000000u;
    if (rest < 0x400u) memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}
FT_INLINE vf vf_load_fp16(const uint16_t *p) {
    vf x;
    FT_FOR_LANES(i) x[i] = ft_from_fp16(p[i]);
    return x;
}
FT_INLINE vf vf_load_uint8(const void *p) {
    vf x;
    FT_FOR_LANES(i) x[i] = (float)((const uint8_t *)p)[i];
    return x;
}
FT_INLINE vf vf_load_int8(const void *p) {
    vf x;
    FT_FOR_LANES(i) x[i] = (float)((const int8_t *)p)[i];
    return x;
}
FT_INLINE void vf_store_bf16(bf16 *p, vf x) { FT_FOR_LANES(i) p[i] = ft_to_bf16(x[i]); }
FT_INLINE vi vi_set1(int32_t x) { return x - (vi){0}; }
FT_INLINE vi vi_load(const void *p) {
    vi x;
    memcpy(&x, p, sizeof x);
    return x;
}
FT_INLINE vi vi_add(vi a, vi b) { return a + b; }
FT_INLINE vi vi_and(vi a, vi b) { return a & b; }
FT_INLINE vi vi_or(vi a, vi b) { return a | b; }
FT_INLINE vi vi_moved(vi a, const int n) { return n < 0 ? (vi)((vu)a >> -n) : (vi)((vu)a << n); }
FT_INLINE vi vi_low_nibbles(vi a) { return a & 0x0f0f0f0f; }
FT_INLINE vi vi_high_nibbles(vi a) { return (a >> 4) & 0x0f0f0f0f; }
FT_INLINE vi vi_lookup(const uint8_t *table, vi index) {
    uint8_t bytes[sizeof index];
    memcpy(bytes, &index, sizeof index);
    for (size_t i = 0; i < sizeof index; i++) bytes[i] = table[bytes[i]];
    return vi_load(bytes);
}
FT_INLINE vf vf_even_bf16(vi pairs) { return (vf)((vu)pairs << 16); }
FT_INLINE vf vf_odd_bf16(vi pairs) { return (vf)((vu)pairs & 0xffff0000u); }
FT_INLINE vf vf_dot_bf16(vf sum, vi w, vi x) {
    return sum + vf_even_bf16(w) * vf_even_bf16(x) + vf_odd_bf16(w) * vf_odd_bf16(x);
}
FT_INLINE vi vi_dot_u8s8(vi sum, vi w, vi x) {
    for (int byte = 0; byte < 4; byte++) {
        vi signed_x = (vi)((vu)x << (24 - 8 * byte)) >> 24;
        sum += (vi)(((vu)w >> (8 * byte)) & 255u) * signed_x;
    }
    return sum;
}
FT_INLINE void vi_gather_u4s8(vi *sum, vi left, vi right, const void *x) {
    vi quad = vi_set1(*(const int32_t *)x);
    sum[0] = vi_dot_u8s8(sum[0], left, quad);
    sum[1] = vi_dot_u8s8(sum[1], right, quad);
}
FT_INLINE vi vi_gathered(vi sum) { return sum; }
FT_INLINE vi vi_even_bytes(vi a) { return a & 0x00ff00ff; }
FT_INLINE vi vi_odd_bytes(vi a) { return (vi)((vu)a >> 8) & 0x00ff00ff; }
FT_INLINE vi vi_dot_pairs(vi sum, vi w, vi x) {
    vi low = ((vi)((vu)w << 16) >> 16) * ((vi)((vu)x << 16) >> 16);
    return sum + low + (w >> 16) * (x >> 16);
}
FT_INLINE void vi_dot_words(vi *sum, vi left, vi right, const void *x) {
    vi pair = vi_set1(*(const int32_t *)x);
    sum[0] = vi_dot_pairs(sum[0], left, pair);
    sum[1] = vi_dot_pairs(sum[1], right, pair);
}
FT_INLINE vi vi_max(vi a, vi b) {
    vi greater = a > b;
    return (a & greater) | (b & ~greater);
}
FT_INLINE int32_t vi_highest(vi a) {
    int32_t highest = a[0];
    FT_FOR_LANES(i) highest = a[i] > highest ? a[i] : highest;
    return highest;
}
FT_INLINE int32_t vi_total(vi a) {
    int32_t total = 0;
    FT_FOR_LANES(i) total += a[i];
    return total;
}
FT_INLINE void vi_store_bytes(void *p, vi a) { FT_FOR_LANES(i) ((int8_t *)p)[i] = (int8_t)a[i]; }
FT_INLINE void vi_store_words(void *p, vi a) {
    static const int places[4] = {0, 2, 1, 3};
    int16_t words[FT_LANES];
    FT_FOR_LANES(i) words[i] = (int16_t)a[(i & ~3) + places[i % 4]];
    memcpy(p, words, sizeof words);
}
#endif

FT_INLINE vf vf_zero(void) { return vf_set1(0.0f); }
FT_INLINE vi vi_zero(void) { return vi_set1(0); }
/* Broadcast the 32-bit group of activations at p to every lane. */
FT_INLINE vi vi_broadcast(const void *p) {
    int32_t group;
    memcpy(&group, p, 4);
    return vi_set1(group);
}
FT_INLINE void ft_prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }

#endif
