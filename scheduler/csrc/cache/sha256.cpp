#include "cache/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tokenspeed::cache {
namespace {

constexpr std::array<std::uint32_t, 8> kInitialState{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr std::array<std::uint32_t, 64> kRoundConstants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

std::uint32_t big_endian(const std::uint8_t* bytes) {
    std::uint32_t word;
    std::memcpy(&word, bytes, sizeof word);
    return std::endian::native == std::endian::little ? __builtin_bswap32(word) : word;
}

void compress_portable(std::array<std::uint32_t, 8>& state, const std::uint8_t* block) {
    std::array<std::uint32_t, 64> words;
    for (std::size_t i = 0; i < 16; ++i) words[i] = big_endian(block + 4 * i);
    for (std::size_t i = 16; i < 64; ++i) {
        const std::uint32_t a = words[i - 15], b = words[i - 2];
        const std::uint32_t small0 = std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3);
        const std::uint32_t small1 = std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10);
        words[i] = words[i - 16] + small0 + words[i - 7] + small1;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (std::size_t i = 0; i < 64; ++i) {
        const std::uint32_t big1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
        const std::uint32_t choice = (e & f) ^ (~e & g);
        const std::uint32_t first = h + big1 + choice + kRoundConstants[i] + words[i];
        const std::uint32_t big0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
        const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
        h = g;
        g = f;
        f = e;
        e = d + first;
        d = c;
        c = b;
        b = a;
        a = first + big0 + majority;
    }
    const std::array<std::uint32_t, 8> added{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state[i] += added[i];
}

#if defined(__x86_64__)

bool machine_has_sha() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool extensions = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29)) != 0;
    return extensions && __builtin_cpu_supports("sse4.1");
}

// Four rounds at a time. The instructions keep the state as ABEF and CDGH.
__attribute__((target("sha,sse4.1"))) void compress_native(std::array<std::uint32_t, 8>& state,
                                                           const std::uint8_t* block) {
    const __m128i byte_order = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data()));        // d c b a
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data() + 4));   // h g f e
    const __m128i badc = _mm_shuffle_epi32(low, 0xb1);
    const __m128i efgh = _mm_shuffle_epi32(high, 0x1b);
    __m128i abef = _mm_alignr_epi8(badc, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, badc, 0xf0);
    const __m128i abef_before = abef, cdgh_before = cdgh;

    __m128i words[4];
    for (int i = 0; i < 4; ++i) {
        words[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block) + i), byte_order);
    }
    for (int group = 0; group < 16; ++group) {
        __m128i& now = words[group % 4];
        if (group >= 4) {
            const __m128i one = words[(group + 1) % 4], two = words[(group + 2) % 4], three = words[(group + 3) % 4];
            const __m128i mixed = _mm_add_epi32(_mm_sha256msg1_epu32(now, one), _mm_alignr_epi8(three, two, 4));
            now = _mm_sha256msg2_epu32(mixed, three);
        }
        const __m128i constants =
            _mm_load_si128(reinterpret_cast<const __m128i*>(kRoundConstants.data()) + group);
        const __m128i sum = _mm_add_epi32(now, constants);
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data()), _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data() + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#else

bool machine_has_sha() { return false; }
void compress_native(std::array<std::uint32_t, 8>& state, const std::uint8_t* block) {
    compress_portable(state, block);
}

#endif

const bool kMachineHasSha = machine_has_sha();
bool portable_forced = false;

}  // namespace

Sha256::Sha256() : state_(kInitialState) {}

bool Sha256::accelerated() { return kMachineHasSha && !portable_forced; }

void Sha256::force_portable(bool on) { portable_forced = on; }

void Sha256::compress(const std::uint8_t* blocks, std::size_t count) {
    const auto step = accelerated() ? compress_native : compress_portable;
    for (std::size_t i = 0; i < count; ++i) step(state_, blocks + 64 * i);
}

void Sha256::update(std::span<const std::uint8_t> bytes) {
    total_bytes_ += bytes.size();
    if (pending_size_ > 0) {
        const std::size_t taken = std::min(bytes.size(), pending_.size() - pending_size_);
        std::copy_n(bytes.begin(), taken, pending_.begin() + static_cast<std::ptrdiff_t>(pending_size_));
        pending_size_ += taken;
        bytes = bytes.subspan(taken);
        if (pending_size_ < pending_.size()) return;
        compress(pending_.data(), 1);
        pending_size_ = 0;
    }
    const std::size_t whole = bytes.size() / 64;
    if (whole > 0) compress(bytes.data(), whole);
    bytes = bytes.subspan(64 * whole);
    std::copy(bytes.begin(), bytes.end(), pending_.begin());
    pending_size_ = bytes.size();
}

Sha256::Output Sha256::finish() {
    const std::uint64_t bits = 8 * total_bytes_;
    std::array<std::uint8_t, 72> padding{0x80};
    const std::size_t zeros = (pending_size_ < 56 ? 55 : 119) - pending_size_;
    for (std::size_t i = 0; i < 8; ++i) {
        padding[1 + zeros + i] = static_cast<std::uint8_t>(bits >> (56 - 8 * i));
    }
    update(std::span(padding).first(1 + zeros + 8));
    Output output;
    for (std::size_t i = 0; i < 32; ++i) output[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return output;
}

}  // namespace tokenspeed::cache
