#include "head_linear.hpp"

#include <algorithm>
#include <cstring>

#include "pool.hpp"
#include "threads.hpp"

namespace tokenspeed {

namespace {

constexpr int64_t kGrain = 16;         // rows: a multiple of what the products take together
constexpr int64_t kPiecesEach = 4;     // pieces of work for each thread
constexpr int64_t kMostTokens = 128;   // that a piece gathers at a time
constexpr int64_t kPieceFloats = 32768;  // results of a piece at most

struct Call {
    const Weight& weight;
    int64_t heads;
    int64_t skipped;
    HeadRows<const float> x;
    int64_t tokens;
    HeadRows<float> out;
    int64_t product_bytes;
    const KernelTable& table;
};

// Rows [begin, end) of a head for some tokens. Inputs and results of several tokens lie apart: they go through scratch.
void multiply(const Call& call, int64_t head, int64_t begin, int64_t end, int64_t token, int64_t tokens) {
    const int64_t columns = call.weight.columns, rows = end - begin;
    const int64_t first = head * (call.weight.rows / call.heads) + call.skipped + begin;
    const Weight part{call.weight.format, rows, columns, call.weight.row_bytes,
                      call.weight.data + first * call.weight.row_bytes, nullptr};
    if (tokens == 1) {
        float* memory = static_cast<float*>(scratch(call.product_bytes));
        call.table.linear(part, call.x.at(token, head), 1, call.out.at(token, head) + begin, 0, rows, memory);
        return;
    }
    char* memory = static_cast<char*>(scratch(call.product_bytes + tokens * (columns + rows) * 4));
    float* inputs = reinterpret_cast<float*>(memory + call.product_bytes);
    float* results = inputs + tokens * columns;
    for (int64_t t = 0; t < tokens; ++t)
        std::memcpy(inputs + t * columns, call.x.at(token + t, head), static_cast<std::size_t>(columns) * 4);
    call.table.linear(part, inputs, tokens, results, 0, rows, reinterpret_cast<float*>(memory));
    for (int64_t t = 0; t < tokens; ++t)
        std::memcpy(call.out.at(token + t, head) + begin, results + t * rows, static_cast<std::size_t>(rows) * 4);
}

}  // namespace

void run_head_linear(const Weight& weight, int64_t heads, int64_t skipped, HeadRows<const float> x, int64_t tokens,
                     HeadRows<float> out) {
    const int64_t each = weight.rows / heads - skipped;
    if (tokens == 0 || each == 0) return;
    const KernelTable& table = kernels();
    const Call call{weight, heads, skipped, x, tokens, out, table.linear_scratch(weight), table};
    // About a nanosecond a unit: a weight is unpacked once, and multiplied for each token.
    const int threads = threads_for(static_cast<double>(heads * each) * static_cast<double>(weight.columns) *
                                    (0.05 + 0.02 * static_cast<double>(tokens)));
    const int64_t together = std::min(tokens, kMostTokens);
    const int64_t most = std::max(kGrain, kPieceFloats / together / kGrain * kGrain);
    const int64_t wanted = (heads * each / (threads * kPiecesEach) / kGrain + 1) * kGrain;
    const int64_t rows = std::min({each, most, wanted});
    const int64_t pieces = (each + rows - 1) / rows;
    parallel_for(heads * pieces, threads, [&](int64_t index) {
        const int64_t head = index / pieces, begin = index % pieces * rows;
        for (int64_t token = 0; token < tokens; token += together)
            multiply(call, head, begin, std::min(each, begin + rows), token, std::min(together, tokens - token));
    });
}

}  // namespace tokenspeed
