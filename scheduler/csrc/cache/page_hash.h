// The identity of prefix pages: a chain of length-framed hashes over a namespace and tokens.
//
//   root(namespace)     = SHA-256( frame("tokenspeed prefix") frame(namespace) )
//   next(prior, tokens) = SHA-256( frame(prior) frame(tokens as 32-bit little-endian) )
//   frame(bytes)        = length of bytes as 32-bit little-endian, bytes
//
// Every section is framed by its length, so no two inputs give the same bytes by being cut differently; all 256 bits are
// kept, so equal digests mean equal content between tenants too.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "cache/sha256.h"

namespace tokenspeed::cache {

using Digest = Sha256::Output;

[[nodiscard]] Digest root_digest(std::string_view name_space);
[[nodiscard]] Digest next_digest(const Digest& prior, std::span<const std::int32_t> tokens);

// One block of one prefix page: the page's digest and the block's place in the page.
struct BlockKey {
    Digest digest{};
    std::int32_t offset = 0;

    bool operator==(const BlockKey&) const = default;
};

struct BlockKeyHash {
    // A digest is uniform already: any eight of its bytes are a good hash.
    std::size_t operator()(const BlockKey& key) const noexcept {
        std::uint64_t word;
        std::memcpy(&word, key.digest.data(), sizeof word);
        return word + 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(key.offset);
    }
};

}  // namespace tokenspeed::cache
