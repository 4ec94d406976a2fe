/* Vectors of sixteen floats, for AVX-512, AVX2 and plain C.
 *
 * Every operation rounds each of the sixteen elements separately, so that an element's bits depend
 * on its inputs and the build alone. Sums over the elements have one fixed order.
 */
#ifndef FT_VECTOR_H
#define FT_VECTOR_H

#include "common.h"

#include <math.h>

#if !defined(FT_SCALAR) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define FT_AVX512 1
#elif !defined(FT_SCALAR) && defined(__AVX2__) && defined(__FMA__)
#define FT_AVX2 1
#endif
#if defined(FT_AVX512) && defined(__AVX512BF16__)
#define FT_DOT_BF16 1 /* one instruction multiplies bf16 pairs and adds the products in fp32 */
#endif
#if defined(FT_AVX512) || defined(FT_AVX2)
#include <immintrin.h>
#endif

#define FT_WIDTH 16

#if defined(FT_AVX512)

typedef __m512 ft_vec;

FT_INLINE ft_vec v_set(float x) { return _mm512_set1_ps(x); }
FT_INLINE ft_vec v_load(const float *p) { return _mm512_loadu_ps(p); }
FT_INLINE void v_store(float *p, ft_vec x) { _mm512_storeu_ps(p, x); }
FT_INLINE ft_vec v_add(ft_vec a, ft_vec b) { return _mm512_add_ps(a, b); }
FT_INLINE ft_vec v_sub(ft_vec a, ft_vec b) { return _mm512_sub_ps(a, b); }
FT_INLINE ft_vec v_mul(ft_vec a, ft_vec b) { return _mm512_mul_ps(a, b); }
FT_INLINE ft_vec v_div(ft_vec a, ft_vec b) { return _mm512_div_ps(a, b); }
FT_INLINE ft_vec v_fma(ft_vec a, ft_vec b, ft_vec c) { return _mm512_fmadd_ps(a, b, c); }
/* The greater, or b if either is NaN: a NaN in b survives. */
FT_INLINE ft_vec v_max(ft_vec a, ft_vec b) { return _mm512_max_ps(a, b); }
FT_INLINE ft_vec v_min(ft_vec a, ft_vec b) { return _mm512_min_ps(a, b); }
FT_INLINE ft_vec v_round(ft_vec x) { return _mm512_roundscale_ps(x, 0); }
/* x times 2 to the power of a whole number from -126 to 127. */
FT_INLINE ft_vec v_scale(ft_vec x, ft_vec power) { return _mm512_scalef_ps(x, power); }

FT_INLINE ft_vec v_load_bf16(const bf16 *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

FT_INLINE void v_store_bf16(bf16 *p, ft_vec x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}

#elif defined(FT_AVX2)

typedef struct {
    __m256 a, b;
} ft_vec;

#define FT_HALVES(f, x, y) ((ft_vec){f((x).a, (y).a), f((x).b, (y).b)})

FT_INLINE ft_vec v_set(float x) { return (ft_vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
FT_INLINE ft_vec v_load(const float *p) {
    return (ft_vec){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
FT_INLINE void v_store(float *p, ft_vec x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
FT_INLINE ft_vec v_add(ft_vec x, ft_vec y) { return FT_HALVES(_mm256_add_ps, x, y); }
FT_INLINE ft_vec v_sub(ft_vec x, ft_vec y) { return FT_HALVES(_mm256_sub_ps, x, y); }
FT_INLINE ft_vec v_mul(ft_vec x, ft_vec y) { return FT_HALVES(_mm256_mul_ps, x, y); }
FT_INLINE ft_vec v_div(ft_vec x, ft_vec y) { return FT_HALVES(_mm256_div_ps, x, y); }
FT_INLINE ft_vec v_max(ft_vec x, ft_vec y) { return FT_HALVES(_mm256_max_ps, x, y); }
FT_INLINE ft_vec v_min(ft_vec x, ft_vec y) { return FT_HALVES(_mm256_min_ps, x, y); }
FT_INLINE ft_vec v_fma(ft_vec x, ft_vec y, ft_vec z) {
    return (ft_vec){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
FT_INLINE ft_vec v_round(ft_vec x) {
    return (ft_vec){_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)};
}
FT_INLINE __m256 ft_power(__m256 power) {
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
FT_INLINE ft_vec v_scale(ft_vec x, ft_vec power) {
    return (ft_vec){_mm256_mul_ps(x.a, ft_power(power.a)), _mm256_mul_ps(x.b, ft_power(power.b))};
}
FT_INLINE __m256 ft_widen8(const bf16 *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
FT_INLINE ft_vec v_load_bf16(const bf16 *p) {
    return (ft_vec){ft_widen8(p), ft_widen8(p + 8)};
}
/* Eight floats, rounded to bf16: the result is in the high 16 bits of each lane. */
FT_INLINE __m256i ft_round8(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(up, quiet, nan);
}
FT_INLINE void v_store_bf16(bf16 *p, ft_vec x) {
    __m256i low = _mm256_srli_epi32(ft_round8(x.a), 16), high = _mm256_srli_epi32(ft_round8(x.b), 16);
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256((__m256i *)p, both);
}

#else

typedef struct {
    float at[FT_WIDTH];
} ft_vec;

#define FT_EACH(expression)                                          \
    ft_vec out;                                                      \
    for (int i = 0; i < FT_WIDTH; i++) out.at[i] = (expression); \
    return out

FT_INLINE ft_vec v_set(float x) { FT_EACH(x); }
FT_INLINE ft_vec v_load(const float *p) { FT_EACH(p[i]); }
FT_INLINE void v_store(float *p, ft_vec x) { memcpy(p, x.at, sizeof x.at); }
FT_INLINE ft_vec v_add(ft_vec x, ft_vec y) { FT_EACH(x.at[i] + y.at[i]); }
FT_INLINE ft_vec v_sub(ft_vec x, ft_vec y) { FT_EACH(x.at[i] - y.at[i]); }
FT_INLINE ft_vec v_mul(ft_vec x, ft_vec y) { FT_EACH(x.at[i] * y.at[i]); }
FT_INLINE ft_vec v_div(ft_vec x, ft_vec y) { FT_EACH(x.at[i] / y.at[i]); }
FT_INLINE ft_vec v_max(ft_vec x, ft_vec y) { FT_EACH(x.at[i] > y.at[i] ? x.at[i] : y.at[i]); }
FT_INLINE ft_vec v_min(ft_vec x, ft_vec y) { FT_EACH(x.at[i] < y.at[i] ? x.at[i] : y.at[i]); }
FT_INLINE ft_vec v_fma(ft_vec x, ft_vec y, ft_vec z) { FT_EACH(x.at[i] * y.at[i] + z.at[i]); }
FT_INLINE ft_vec v_round(ft_vec x) { FT_EACH(nearbyintf(x.at[i])); }
FT_INLINE ft_vec v_scale(ft_vec x, ft_vec power) {
    FT_EACH(x.at[i] * ldexpf(1.0f, (int)power.at[i]));
}
FT_INLINE ft_vec v_load_bf16(const bf16 *p) { FT_EACH(ft_from_bf16(p[i])); }
FT_INLINE void v_store_bf16(bf16 *p, ft_vec x) {
    for (int i = 0; i < FT_WIDTH; i++) p[i] = ft_to_bf16(x.at[i]);
}

#endif

/* v_sum and v_top: the sum and the maximum of the sixteen elements, of halves, then quarters, and
 * so on. v_exceeds: whether any element of x is greater than the same element of y. */
#if defined(FT_AVX512)
FT_INLINE float v_sum(ft_vec x) { return _mm512_reduce_add_ps(x); }
FT_INLINE float v_top(ft_vec x) { return _mm512_reduce_max_ps(x); }
FT_INLINE int v_exceeds(ft_vec x, ft_vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ) != 0; }
#elif defined(FT_AVX2)
#define FT_FOLD(f, x)                                                                  \
    __m256 eight = _mm256_##f##_ps((x).a, (x).b);                                        \
    __m128 four = _mm_##f##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
    __m128 two = _mm_##f##_ps(four, _mm_movehl_ps(four, four));                          \
    return _mm_cvtss_f32(_mm_##f##_ps(two, _mm_movehdup_ps(two)))
FT_INLINE float v_sum(ft_vec x) { FT_FOLD(add, x); }
FT_INLINE float v_top(ft_vec x) { FT_FOLD(max, x); }
FT_INLINE int v_exceeds(ft_vec x, ft_vec y) {
    __m256 greater = _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ);
    return _mm256_movemask_ps(_mm256_or_ps(greater, _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))) != 0;
}
#else
FT_INLINE float v_sum(ft_vec x) {
    float at[FT_WIDTH];
    v_store(at, x);
    for (int half = FT_WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) at[i] += at[i + half];
    return at[0];
}

FT_INLINE float v_top(ft_vec x) {
    float at[FT_WIDTH];
    v_store(at, x);
    for (int half = FT_WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) at[i] = at[i] > at[i + half] ? at[i] : at[i + half];
    return at[0];
}

FT_INLINE int v_exceeds(ft_vec x, ft_vec y) {
    int any = 0;
    for (int i = 0; i < FT_WIDTH; i++) any |= x.at[i] > y.at[i];
    return any;
}
#endif

/* e to the power of x, where x is clamped to [-87, 88]. Relative error below 2e-7, exactly 1 at 0,
 * NaN at NaN. A Taylor polynomial on [-ln2 / 2, ln2 / 2]. */
FT_INLINE ft_vec v_exp(ft_vec x) {
    x = v_min(v_set(88.0f), v_max(v_set(-87.0f), x));
    ft_vec power = v_round(v_mul(x, v_set(1.44269504f)));
    ft_vec rest = v_fma(power, v_set(-0.693359375f), x); /* ln 2 in two parts, the first exact */
    rest = v_fma(power, v_set(2.12194440e-4f), rest);
    ft_vec sum = v_set(1.0f / 5040);
    sum = v_fma(sum, rest, v_set(1.0f / 720));
    sum = v_fma(sum, rest, v_set(1.0f / 120));
    sum = v_fma(sum, rest, v_set(1.0f / 24));
    sum = v_fma(sum, rest, v_set(1.0f / 6));
    sum = v_fma(sum, rest, v_set(0.5f));
    sum = v_fma(sum, rest, v_set(1.0f));
    sum = v_fma(sum, rest, v_set(1.0f));
    return v_scale(sum, power);
}

FT_INLINE ft_vec v_silu(ft_vec x) {
    return v_div(x, v_add(v_exp(v_sub(v_set(0.0f), x)), v_set(1.0f)));
}

FT_INLINE ft_vec v_sigmoid(ft_vec x) {
    return v_div(v_set(1.0f), v_add(v_exp(v_sub(v_set(0.0f), x)), v_set(1.0f)));
}

/* tanh, exactly -1 and 1 beyond 9, NaN at NaN. Relative error below 4e-7. A Pade approximant of a
 * quarter of x, then tanh(2 y) = 2 t / (1 + t t) twice, which keeps the relative error. */
FT_INLINE ft_vec v_tanh(ft_vec x) {
    x = v_min(v_set(9.0f), v_max(v_set(-9.0f), x));
    ft_vec y = v_mul(x, v_set(0.25f)), square = v_mul(y, y);
    ft_vec above = v_fma(v_add(square, v_set(378.0f)), square, v_set(17325.0f));
    above = v_mul(v_fma(above, square, v_set(135135.0f)), y);
    ft_vec below = v_fma(v_set(28.0f), square, v_set(3150.0f));
    below = v_fma(v_fma(below, square, v_set(62370.0f)), square, v_set(135135.0f));
    ft_vec t = v_div(above, below);
    for (int i = 0; i < 2; i++)
        t = v_div(v_add(t, t), v_fma(t, t, v_set(1.0f)));
    return t;
}

/* Load or store the first n of sixteen elements; the others load as 0. */
FT_INLINE ft_vec v_load_n(const float *p, int64_t n) {
    if (n >= FT_WIDTH) return v_load(p);
    float at[FT_WIDTH] = {0};
    memcpy(at, p, (size_t)n * 4);
    return v_load(at);
}

FT_INLINE void v_store_n(float *p, ft_vec x, int64_t n) {
    if (n >= FT_WIDTH) {
        v_store(p, x);
        return;
    }
    float at[FT_WIDTH];
    v_store(at, x);
    memcpy(p, at, (size_t)n * 4);
}

/* The largest absolute value of n floats; NaN if one of them is not finite. */
FT_INLINE float v_reach(const float *p, int64_t n) {
    ft_vec top = v_set(0.0f), taint = v_set(0.0f); /* maxima lose a NaN, sums do not */
    for (int64_t i = 0; i < n; i += FT_WIDTH) {
        ft_vec x = v_load_n(p + i, n - i);
        top = v_max(v_max(x, v_sub(v_set(0.0f), x)), top);
        taint = v_fma(x, v_set(0.0f), taint);
    }
    return v_top(top) + v_sum(taint);
}

/* Load and store the first n elements from item `at` on, which are bf16 or float. */
FT_INLINE ft_vec v_get(const void *p, int64_t at, int64_t n, int is_bf16) {
    if (!is_bf16) return v_load_n((const float *)p + at, n);
    const bf16 *source = (const bf16 *)p + at;
    if (n >= FT_WIDTH) return v_load_bf16(source);
    bf16 part[FT_WIDTH] = {0};
    memcpy(part, source, (size_t)n * 2);
    return v_load_bf16(part);
}

FT_INLINE void v_put(void *p, int64_t at, ft_vec x, int64_t n, int is_bf16) {
    if (!is_bf16) {
        v_store_n((float *)p + at, x, n);
        return;
    }
    bf16 *target = (bf16 *)p + at;
    if (n >= FT_WIDTH) {
        v_store_bf16(target, x);
        return;
    }
    bf16 part[FT_WIDTH];
    v_store_bf16(part, x);
    memcpy(target, part, (size_t)n * 2);
}

/* Round to bf16, or return float elements unchanged. */
FT_INLINE ft_vec v_as(ft_vec x, int is_bf16) {
    if (!is_bf16) return x;
    bf16 rounded[FT_WIDTH];
    v_store_bf16(rounded, x);
    return v_load_bf16(rounded);
}

#endif
