// Weight formats by the names that Python has for them.
#pragma once

#include <stdexcept>
#include <string>

#include "table.hpp"

namespace tokenspeed {

struct BlockLayout {
    WeightFormat format;
    int64_t columns;  // of a block
    int64_t bytes;
};

// Throws std::invalid_argument for a name that the kernels do not know.
inline BlockLayout block_layout(const std::string& format) {
    if (format == "float32") return {WeightFormat::kFloat32, 1, 4};
    if (format == "bfloat16") return {WeightFormat::kBFloat16, 1, 2};
    if (format == "float16") return {WeightFormat::kFloat16, 1, 2};
    if (format == "gguf_q4_0") return {WeightFormat::kQ4_0, 32, 18};
    if (format == "gguf_q4_1") return {WeightFormat::kQ4_1, 32, 20};
    if (format == "gguf_q5_0") return {WeightFormat::kQ5_0, 32, 22};
    if (format == "gguf_q5_1") return {WeightFormat::kQ5_1, 32, 24};
    if (format == "gguf_q8_0") return {WeightFormat::kQ8_0, 32, 34};
    if (format == "gguf_mxfp4") return {WeightFormat::kMxfp4, 32, 17};
    if (format == "nvfp4") return {WeightFormat::kNvfp4, 64, 40};
    if (format == "fp8_blocks") return {WeightFormat::kFp8Blocks, 128, 132};
    if (format == "gguf_q2_k") return {WeightFormat::kQ2_K, 256, 84};
    if (format == "gguf_q3_k") return {WeightFormat::kQ3_K, 256, 110};
    if (format == "gguf_q4_k") return {WeightFormat::kQ4_K, 256, 144};
    if (format == "gguf_q5_k") return {WeightFormat::kQ5_K, 256, 176};
    if (format == "gguf_q6_k") return {WeightFormat::kQ6_K, 256, 210};
    throw std::invalid_argument("weight format '" + format + "' is unknown to the CPU kernels");
}

// The matrix [rows, columns] that lies at `data`; throws std::invalid_argument where its columns are no whole blocks.
inline Weight weight_at(const std::string& format, int64_t rows, int64_t columns, const uint8_t* data, const float* bias) {
    const BlockLayout layout = block_layout(format);
    if (columns % layout.columns != 0)
        throw std::invalid_argument(std::to_string(columns) + " columns do not divide into " + format + " blocks of " +
                                    std::to_string(layout.columns));
    return {layout.format, rows, columns, columns / layout.columns * layout.bytes, data, bias};
}

}  // namespace tokenspeed
