// SHA-256 (FIPS 180-4), for the identity of prefix pages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tokenspeed::cache {

class Sha256 {
public:
    using Output = std::array<std::uint8_t, 32>;

    Sha256();
    void update(std::span<const std::uint8_t> bytes);
    // Ends the message and returns its hash; the object must not be used afterwards.
    Output finish();

    // Whether this machine's own SHA instructions are used (the portable code gives the same hashes).
    static bool accelerated();
    // For tests: forces the portable code on (true) or lets the machine decide (false).
    static void force_portable(bool on);

private:
    void compress(const std::uint8_t* blocks, std::size_t count);

    std::array<std::uint32_t, 8> state_;
    std::array<std::uint8_t, 64> pending_{};
    std::size_t pending_size_ = 0;
    std::uint64_t total_bytes_ = 0;
};

}  // namespace tokenspeed::cache
