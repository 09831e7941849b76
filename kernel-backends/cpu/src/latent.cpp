#include "latent.hpp"

#include "addresses.hpp"
#include "drivers.hpp"
#include "recording.hpp"

namespace nb = nanobind;

namespace tokenspeed {
namespace {

// A cache whose keys and values are one plane of one head.
Cache latent_cache(Address data, KvType type, int64_t block_stride, int64_t token_stride, int64_t page_size,
                   int64_t width) {
    const CachePlane plane{at<uint8_t>(data), block_stride, 0, token_stride};
    return {plane, plane, type, page_size, width};
}

void mla_prologue(Address q, int64_t q_stride, int64_t q_heads, int64_t plain_dim, Address compressed,
                  int64_t compressed_stride, int64_t latent_dim, int64_t rotary_dim, int64_t tokens, Address positions,
                  Address cos_sin, Address latent_norm, float epsilon, KvType type, Address cache, int64_t block_stride,
                  int64_t token_stride, int64_t page_size, Address slots) {
    const LatentPrologue call{
        at<float>(q),
        at<const float>(compressed),
        q_stride,
        compressed_stride,
        q_heads,
        plain_dim,
        latent_dim,
        rotary_dim,
        at<const int32_t>(positions),
        at<const float>(cos_sin),
        at<const float>(latent_norm),
        epsilon,
        at<const int64_t>(slots),
        latent_cache(cache, type, block_stride, token_stride, page_size, latent_dim + rotary_dim)};
    nb::gil_scoped_release released;
    make_call([call, tokens] { run_latent_prologue(call, tokens); });
}

// query_start 0: every sequence has queries_each tokens. lse 0: not wanted.
void mla_attend(Address q_latent, int64_t latent_token_stride, int64_t latent_head_stride, int64_t latent_dim,
                Address q_rope, int64_t rope_token_stride, int64_t rope_head_stride, int64_t rotary_dim, int64_t tokens,
                int64_t q_heads, KvType type, Address cache, int64_t block_stride, int64_t token_stride,
                int64_t page_size, Address page_table, int64_t page_table_stride, Address query_start,
                int64_t queries_each, Address lengths, int64_t sequences, float scale, int64_t parts, bool rounded,
                Address out, Address lse) {
    const Attention call{{{at<const float>(q_latent), latent_token_stride, latent_head_stride, latent_dim},
                          {at<const float>(q_rope), rope_token_stride, rope_head_stride, rotary_dim}},
                         tokens,
                         at<float>(out),
                         at<float>(lse),
                         q_heads,
                         1,
                         latent_dim,
                         latent_cache(cache, type, block_stride, token_stride, page_size, latent_dim + rotary_dim),
                         at<const int32_t>(page_table),
                         page_table_stride,
                         at<const int32_t>(query_start),
                         queries_each,
                         at<const int32_t>(lengths),
                         sequences,
                         scale,
                         0,
                         parts,
                         rounded};
    nb::gil_scoped_release released;
    make_call([call] { run_attention(call); });
}

void merge_partials(Address partials, Address partial_lse, int64_t parts, int64_t rows, int64_t dim, Address out,
                    Address lse) {
    const PartialMerge call{
        at<const float>(partials), at<const float>(partial_lse), at<float>(out), at<float>(lse), parts, rows, dim};
    nb::gil_scoped_release released;
    make_call([call] { run_merge_partials(call); });
}

}  // namespace

void bind_latent(nb::module_& m) {
    m.attr("MAX_LATENT_DIM") = kMaxLatentDim;
    m.attr("MAX_ROTARY_DIM") = kMaxRotaryDim;
    m.def("mla_prologue", &mla_prologue);
    m.def("mla_attend", &mla_attend);
    m.def("merge_partials", &merge_partials);
}

}  // namespace tokenspeed
