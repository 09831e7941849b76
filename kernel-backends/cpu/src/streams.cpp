// Hyper-connections: residual streams of a token mixed into one and spread again. Contracts: tokenspeed_kernel/ops/hyper.py.
#include <algorithm>
#include <cmath>
#include <vector>

#include "addresses.hpp"
#include "compressed.hpp"
#include "drivers.hpp"
#include "pool.hpp"
#include "recording.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace tokenspeed {
namespace {

struct Streams {
    float* data;  // [tokens, count, width]
    int64_t tokens, count, width;

    int64_t size() const { return count * width; }
};

struct Shares {
    const float* projection;  // [rows, count * width]
    const float* base;        // [rows]
    const float* scale;
    float epsilon, floor;
};

struct Mix {
    Streams streams;
    Shares shares;
    int64_t rounds;
    float* post;
    float* comb;
    float* out;
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// 1 / sqrt(mean of the squares + epsilon), added up in 16 sums whatever the instruction set.
float inverse_size(const float* x, int64_t size, float epsilon) {
    float sums[16] = {};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int64_t j = 0; j < 16; ++j) sums[j] += x[i + j] * x[i + j];
    for (; i < size; ++i) sums[i % 16] += x[i] * x[i];
    float total = 0.0f;
    for (const float sum : sums) total += sum;
    return 1.0f / std::sqrt(total / static_cast<float>(size) + epsilon);
}

// z of all tokens: the product first, for the norm is one factor of a token.
const float* projected(const Streams& streams, const Shares& shares, int64_t rows) {
    thread_local std::vector<float> z;
    z.resize(static_cast<std::size_t>(std::max<int64_t>(1, streams.tokens * rows)));
    const Weight weight{WeightFormat::kFloat32, rows, streams.size(), streams.size() * 4,
                        reinterpret_cast<const uint8_t*>(shares.projection), nullptr};
    run_linear(weight, streams.data, streams.tokens, z.data());
    float* all = z.data();
    over_ranges(streams.tokens, 1, threads_for(static_cast<double>(streams.tokens * streams.size()) * 0.3), 2,
                [&](int64_t begin, int64_t end) {
                    for (int64_t t = begin; t < end; ++t) {
                        const float factor = inverse_size(streams.data + t * streams.size(), streams.size(), shares.epsilon);
                        for (int64_t i = 0; i < rows; ++i) all[t * rows + i] *= factor;
                    }
                });
    return all;
}

void gather(const Streams& streams, const Shares& shares, const float* z, int64_t token, float* out) {
    for (int64_t n = 0; n < streams.count; ++n) {
        const float share = sigmoid(z[n] * shares.scale[0] + shares.base[n]) + shares.floor;
        const float* stream = streams.data + token * streams.size() + n * streams.width;
        for (int64_t i = 0; i < streams.width; ++i) out[i] = n == 0 ? share * stream[i] : out[i] + share * stream[i];
    }
}

// Divides rows (step 1, pitch n) or columns (step n, pitch 1) by their sum + floor.
void normalise(float* matrix, int64_t n, int64_t step, int64_t pitch, float floor) {
    for (int64_t line = 0; line < n; ++line) {
        float sum = 0.0f;
        for (int64_t i = 0; i < n; ++i) sum += matrix[line * pitch + i * step];
        for (int64_t i = 0; i < n; ++i) matrix[line * pitch + i * step] /= sum + floor;
    }
}

void mixing(const Mix& call, const float* z, int64_t token) {
    const int64_t n = call.streams.count;
    const Shares& shares = call.shares;
    for (int64_t i = 0; i < n; ++i)
        call.post[token * n + i] = 2.0f * sigmoid(z[n + i] * shares.scale[1] + shares.base[n + i]);
    float* matrix = call.comb + token * n * n;
    for (int64_t row = 0; row < n; ++row) {
        float* line = matrix + row * n;
        float best = -INFINITY, sum = 0.0f;
        for (int64_t i = 0; i < n; ++i) {
            line[i] = z[2 * n + row * n + i] * shares.scale[2] + shares.base[2 * n + row * n + i];
            best = line[i] > best ? line[i] : best;
        }
        for (int64_t i = 0; i < n; ++i) sum += line[i] = std::exp(line[i] - best);
        for (int64_t i = 0; i < n; ++i) line[i] = line[i] / sum + shares.floor;
    }
    normalise(matrix, n, n, 1, shares.floor);
    for (int64_t round = 1; round < call.rounds; ++round) {
        normalise(matrix, n, 1, n, shares.floor);
        normalise(matrix, n, n, 1, shares.floor);
    }
}

void run_mix(const Mix& call) {
    const Streams& streams = call.streams;
    const int64_t rows = (2 + streams.count) * streams.count;
    const float* z = projected(streams, call.shares, rows);
    over_ranges(streams.tokens, 1, threads_for(static_cast<double>(streams.tokens * streams.size()) * 0.3), 2,
                [&](int64_t begin, int64_t end) {
                    for (int64_t t = begin; t < end; ++t) {
                        gather(streams, call.shares, z + t * rows, t, call.out + t * streams.width);
                        mixing(call, z + t * rows, t);
                    }
                });
}

void run_collapse(const Streams& streams, const Shares& shares, float* out) {
    const float* z = projected(streams, shares, streams.count);
    over_ranges(streams.tokens, 1, threads_for(static_cast<double>(streams.tokens * streams.size()) * 0.3), 2,
                [&](int64_t begin, int64_t end) {
                    for (int64_t t = begin; t < end; ++t)
                        gather(streams, shares, z + t * streams.count, t, out + t * streams.width);
                });
}

// A token's streams, in pieces of 64 elements: all of a piece is read before it is written.
void spread(const Streams& streams, const float* x, const float* post, const float* comb, int64_t token) {
    constexpr int64_t kPiece = 64;
    thread_local std::vector<float> memory;
    const int64_t n = streams.count;
    memory.resize(static_cast<std::size_t>(n * kPiece));
    float* all = streams.data + token * streams.size();
    for (int64_t begin = 0; begin < streams.width; begin += kPiece) {
        const int64_t count = std::min(kPiece, streams.width - begin);
        for (int64_t k = 0; k < n; ++k) {
            float* mixed = memory.data() + k * kPiece;
            for (int64_t i = 0; i < count; ++i) mixed[i] = post[token * n + k] * x[token * streams.width + begin + i];
            for (int64_t j = 0; j < n; ++j) {
                const float share = comb[(token * n + j) * n + k];
                const float* stream = all + j * streams.width + begin;
                for (int64_t i = 0; i < count; ++i) mixed[i] += share * stream[i];
            }
        }
        for (int64_t k = 0; k < n; ++k)
            std::copy_n(memory.data() + k * kPiece, count, all + k * streams.width + begin);
    }
}

void hyper_begin(Address x, Address streams, int64_t tokens, int64_t count, int64_t width) {
    nb::gil_scoped_release released;
    make_call([=] {
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t n = 0; n < count; ++n)
                std::copy_n(at<const float>(x) + t * width, width, at<float>(streams) + (t * count + n) * width);
    });
}

void hyper_mix(Address streams, int64_t tokens, int64_t count, int64_t width, Address projection, Address base, Address scale,
               float epsilon, float floor, int64_t rounds, Address post, Address comb, Address out) {
    const Mix call{{at<float>(streams), tokens, count, width},
                   {at<const float>(projection), at<const float>(base), at<const float>(scale), epsilon, floor},
                   rounds,
                   at<float>(post),
                   at<float>(comb),
                   at<float>(out)};
    nb::gil_scoped_release released;
    make_call([call] { run_mix(call); });
}

void hyper_collapse(Address streams, int64_t tokens, int64_t count, int64_t width, Address projection, Address base,
                    Address scale, float epsilon, float floor, Address out) {
    const Streams all{at<float>(streams), tokens, count, width};
    const Shares shares{at<const float>(projection), at<const float>(base), at<const float>(scale), epsilon, floor};
    nb::gil_scoped_release released;
    make_call([all, shares, out] { run_collapse(all, shares, at<float>(out)); });
}

void hyper_spread(Address x, Address post, Address comb, Address streams, int64_t tokens, int64_t count, int64_t width) {
    const Streams all{at<float>(streams), tokens, count, width};
    nb::gil_scoped_release released;
    make_call([=] {
        over_ranges(all.tokens, 1, threads_for(static_cast<double>(all.tokens * all.size() * all.count) * 0.2), 2,
                    [&](int64_t begin, int64_t end) {
                        for (int64_t t = begin; t < end; ++t)
                            spread(all, at<const float>(x), at<const float>(post), at<const float>(comb), t);
                    });
    });
}

}  // namespace

void bind_streams(nb::module_& m) {
    m.def("hyper_begin", &hyper_begin);
    m.def("hyper_mix", &hyper_mix);
    m.def("hyper_collapse", &hyper_collapse);
    m.def("hyper_spread", &hyper_spread);
}

}  // namespace tokenspeed
