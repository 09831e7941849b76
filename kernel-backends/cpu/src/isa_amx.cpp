// The products of AMX; CMakeLists.txt gives this file its flags. It compiles on any x86-64 and has not run on hardware.
#include <immintrin.h>

#include "kernels/linear_tiles.hpp"

namespace tokenspeed::amx {
namespace {

// What ldtilecfg reads.
struct alignas(64) Configuration {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tile 0 are the sums, 1 the weights, 2 the inputs: 16 rows of 64 bytes each. The configuration is the thread's.
class Unit {
public:
    Unit() {
        Configuration configuration;
        for (int tile = 0; tile < 3; ++tile) {
            configuration.row_bytes[tile] = 64;
            configuration.rows[tile] = 16;
        }
        _tile_loadconfig(&configuration);
    }
    ~Unit() { _tile_release(); }
    void clear() { _tile_zero(0); }
    void add(const uint8_t* rows, int64_t row_bytes, const uint16_t* inputs) {
        _tile_loadd(1, rows, row_bytes);
        _tile_loadd(2, inputs, 64);
        _tile_dpbf16ps(0, 1, 2);
    }
    void store(float* sums) { _tile_stored(0, sums, 64); }
};

}  // namespace

extern decltype(&linear_tiles<Unit>) const kLinear;
decltype(&linear_tiles<Unit>) const kLinear = &linear_tiles<Unit>;

}  // namespace tokenspeed::amx
