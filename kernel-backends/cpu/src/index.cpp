// Selecting is done for some queries at a time: all their scores, spread over threads by stretches of entries, then the best
// of each. A score and a choice depend on the query alone, so neither on how the work is spread nor on what else is asked.
#include "index.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "addresses.hpp"
#include "drivers.hpp"
#include "pool.hpp"
#include "recording.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace tokenspeed {
namespace {

constexpr int64_t kStretch = 16 * kKeyTile;       // entries that one thread scores at a time
constexpr int64_t kMostScores = int64_t{1} << 22;  // scores held at one time, unless one query needs more

struct Selection {
    const float* q;  // [tokens, heads, dim]; the heads of a token are dense
    int64_t q_stride;
    const float* weights;  // [tokens, heads], dense
    int64_t heads, dim;
    Cache cache;
    const int32_t* page_table;
    int64_t page_table_stride;
    const int32_t* query_start;
    const int32_t* lengths;  // in tokens
    int64_t sequences;
    int64_t stride;     // tokens of an entry
    int32_t* selected;  // [tokens, count], dense
    int64_t count;
};

// A query that has more entries than it may keep.
struct Scoring {
    int64_t token;
    int64_t sequence;
    int64_t entries;
    int64_t place;  // of its scores
};

// A number that orders as the score does; a NaN is above all, and the two zeros are one.
uint32_t rank_of(float score) {
    if (score != score) return UINT32_MAX;
    score += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

void choose(const float* scores, int64_t entries, int64_t count, int32_t* chosen) {
    thread_local std::vector<uint32_t> ranks, sorted;
    ranks.resize(static_cast<std::size_t>(entries));
    for (int64_t i = 0; i < entries; ++i) ranks[static_cast<std::size_t>(i)] = rank_of(scores[i]);
    sorted = ranks;
    std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<>());
    const uint32_t least = sorted[static_cast<std::size_t>(count - 1)];
    int64_t equals = count;  // of those that are as good as the least, the lowest so many are taken
    for (const uint32_t rank : ranks) equals -= rank > least;
    for (int64_t i = 0; i < entries; ++i) {
        const uint32_t rank = ranks[static_cast<std::size_t>(i)];
        if (rank > least || (rank == least && equals-- > 0)) *chosen++ = static_cast<int32_t>(i);
    }
}

void select_scored(const Selection& call, const std::vector<Scoring>& queries, float* scores) {
    struct Piece {
        const Scoring* query;
        int64_t begin;
    };
    std::vector<Piece> pieces;
    double work = 0;
    for (const Scoring& query : queries) {
        for (int64_t begin = 0; begin < query.entries; begin += kStretch) pieces.push_back({&query, begin});
        work += static_cast<double>(query.entries * call.heads * call.dim) * 0.03;
    }
    const KernelTable& table = kernels();
    const int threads = threads_for(work);
    parallel_for(static_cast<int64_t>(pieces.size()), threads, [&](int64_t i) {
        const Piece& piece = pieces[static_cast<std::size_t>(i)];
        const Scoring& query = *piece.query;
        table.index_scores(call.cache,
                           {call.q + query.token * call.q_stride, call.weights + query.token * call.heads, call.heads,
                            call.dim, call.page_table + query.sequence * call.page_table_stride},
                           piece.begin, std::min(piece.begin + kStretch, query.entries),
                           scores + query.place + piece.begin);
    });
    parallel_for(static_cast<int64_t>(queries.size()), threads, [&](int64_t i) {
        const Scoring& query = queries[static_cast<std::size_t>(i)];
        choose(scores + query.place, query.entries, call.count, call.selected + query.token * call.count);
    });
}

void run_index_select(const Selection& call) {
    thread_local std::vector<float> scores;
    std::vector<Scoring> queries;
    int64_t held = 0;
    const auto flush = [&] {
        if (static_cast<int64_t>(scores.size()) < held) scores.resize(static_cast<std::size_t>(held));
        select_scored(call, queries, scores.data());
        queries.clear();
        held = 0;
    };
    for (int64_t sequence = 0; sequence < call.sequences; ++sequence) {
        const int64_t end = call.query_start[sequence + 1];
        for (int64_t token = call.query_start[sequence]; token < end; ++token) {
            const int64_t seen = std::max<int64_t>(0, call.lengths[sequence] - (end - 1 - token)) / call.stride;
            int32_t* chosen = call.selected + token * call.count;
            if (seen <= call.count) {
                for (int64_t i = 0; i < call.count; ++i) chosen[i] = i < seen ? static_cast<int32_t>(i) : -1;
                continue;
            }
            if (held > 0 && held + seen > kMostScores) flush();
            queries.push_back({token, sequence, seen, held});
            held += seen;
        }
    }
    if (!queries.empty()) flush();
}

Cache one_plane(Address data, KvType type, int64_t block_stride, int64_t token_stride, int64_t page_size, int64_t width) {
    const CachePlane plane{at<uint8_t>(data), block_stride, 0, token_stride};
    return {plane, plane, type, page_size, width};
}

void index_prologue(Address q, int64_t q_stride, int64_t q_heads, Address key, int64_t key_stride, int64_t dim,
                    int64_t rotary_dim, int64_t tokens, Address positions, Address cos_sin, Address norm_weight,
                    Address norm_bias, float epsilon, KvType type, Address cache, int64_t block_stride,
                    int64_t token_stride, int64_t page_size, Address slots) {
    const IndexPrologue call{at<float>(q),
                             at<const float>(key),
                             q_stride,
                             key_stride,
                             q_heads,
                             dim,
                             rotary_dim,
                             at<const int32_t>(positions),
                             at<const float>(cos_sin),
                             at<const float>(norm_weight),
                             at<const float>(norm_bias),
                             epsilon,
                             at<const int64_t>(slots),
                             one_plane(cache, type, block_stride, token_stride, page_size, dim)};
    nb::gil_scoped_release released;
    make_call([call, tokens] {
        const KernelTable& table = kernels();
        const int64_t elements = call.q_heads * call.rotary_dim + 2 * call.dim;
        over_ranges(tokens, 1, threads_for(static_cast<double>(tokens * elements) * 0.5), 2,
                    [&](int64_t begin, int64_t end) { table.index_prologue(call, begin, end); });
    });
}

void index_select(Address q, int64_t q_stride, Address weights, int64_t heads, int64_t dim, KvType type, Address cache,
                  int64_t block_stride, int64_t token_stride, int64_t page_size, Address page_table,
                  int64_t page_table_stride, Address query_start, Address lengths, int64_t sequences, int64_t stride,
                  Address selected, int64_t count) {
    const Selection call{at<const float>(q),
                         q_stride,
                         at<const float>(weights),
                         heads,
                         dim,
                         one_plane(cache, type, block_stride, token_stride, page_size, dim),
                         at<const int32_t>(page_table),
                         page_table_stride,
                         at<const int32_t>(query_start),
                         at<const int32_t>(lengths),
                         sequences,
                         stride,
                         at<int32_t>(selected),
                         count};
    nb::gil_scoped_release released;
    make_call([call] { run_index_select(call); });
}

// lse 0: not wanted.
void mla_selected(Address q_latent, int64_t latent_token_stride, int64_t latent_head_stride, int64_t latent_dim,
                  Address q_rope, int64_t rope_token_stride, int64_t rope_head_stride, int64_t rotary_dim, int64_t tokens,
                  int64_t q_heads, KvType type, Address cache, int64_t block_stride, int64_t token_stride,
                  int64_t page_size, Address page_table, int64_t page_table_stride, Address query_start,
                  int64_t sequences, Address selected, int64_t count, float scale, bool rounded, Address out,
                  Address lse) {
    const Attention call{{{at<const float>(q_latent), latent_token_stride, latent_head_stride, latent_dim},
                          {at<const float>(q_rope), rope_token_stride, rope_head_stride, rotary_dim}},
                         tokens,
                         at<float>(out),
                         at<float>(lse),
                         q_heads,
                         1,
                         latent_dim,
                         one_plane(cache, type, block_stride, token_stride, page_size, latent_dim + rotary_dim),
                         at<const int32_t>(page_table),
                         page_table_stride,
                         at<const int32_t>(query_start),
                         0,
                         nullptr,
                         sequences,
                         scale,
                         0,
                         1,
                         rounded,
                         nullptr,
                         0.0f,
                         at<const int32_t>(selected),
                         count};
    nb::gil_scoped_release released;
    make_call([call] { run_attention(call); });
}

}  // namespace

void bind_index(nb::module_& m) {
    m.attr("MAX_INDEX_DIM") = kMaxIndexDim;
    m.def("index_prologue", &index_prologue);
    m.def("index_select", &index_select);
    m.def("mla_selected", &mla_selected);
}

}  // namespace tokenspeed
