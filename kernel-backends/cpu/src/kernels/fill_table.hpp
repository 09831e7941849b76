// The table of the instruction set that includes this file; the last of the kernel headers.

namespace tokenspeed::TOKENSPEED_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {
    TOKENSPEED_ISA_NAME, nullptr, nullptr, linear_scratch, linear, decode_row, rms_norm, silu_and_mul, prologue,
    attend, merge, finish, latent_prologue, merge_partials, argmax, has_nan, maximum, shifted_exp,
    clamped_swiglu,
    gelu_tanh_and_mul,
    {causal_conv, gated_delta, gated_norm, sigmoid_gate, add_to},
    index_prologue, index_scores, store_entry, load_entry,
    nullptr, attend_expanded,
};

}  // namespace tokenspeed::TOKENSPEED_ISA
