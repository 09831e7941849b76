#include "cache/page_hash.h"

#include <bit>

namespace tokenspeed::cache {
namespace {

void put_length(Sha256& hash, std::size_t length) {
    std::array<std::uint8_t, 4> bytes;
    for (std::size_t i = 0; i < 4; ++i) bytes[i] = static_cast<std::uint8_t>(length >> (8 * i));
    hash.update(bytes);
}

void put_frame(Sha256& hash, std::span<const std::uint8_t> bytes) {
    put_length(hash, bytes.size());
    hash.update(bytes);
}

std::span<const std::uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

}  // namespace

Digest root_digest(std::string_view name_space) {
    Sha256 hash;
    put_frame(hash, bytes_of("tokenspeed prefix"));
    put_frame(hash, bytes_of(name_space));
    return hash.finish();
}

Digest next_digest(const Digest& prior, std::span<const std::int32_t> tokens) {
    static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie in memory");
    Sha256 hash;
    put_frame(hash, prior);
    put_frame(hash, {reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size_bytes()});
    return hash.finish();
}

}  // namespace tokenspeed::cache
