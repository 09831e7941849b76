#include "scheduler/plan.h"

#include <bit>

namespace tokenspeed {
namespace {

// Frames everything by its length, in little-endian, so that different plans cannot give the same bytes.
class PlanHash {
public:
    void put(std::int64_t value) {
        static_assert(std::endian::native == std::endian::little, "plans are hashed as they lie in memory");
        hash_.update({reinterpret_cast<const std::uint8_t*>(&value), sizeof value});
    }
    void put(const IntArray& array) {
        put(static_cast<std::int64_t>(array.size()));
        hash_.update({reinterpret_cast<const std::uint8_t*>(array.data()), array.size() * sizeof(std::int32_t)});
    }
    void put(const std::vector<std::uint8_t>& bytes) {
        put(static_cast<std::int64_t>(bytes.size()));
        hash_.update(bytes);
    }
    void put(const std::string& text) {
        put(static_cast<std::int64_t>(text.size()));
        hash_.update({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
    }
    template <typename... Values>
    void put_all(const Values&... values) {
        (put(values), ...);
    }
    cache::Sha256::Output finish() { return hash_.finish(); }

private:
    cache::Sha256 hash_;
};

}  // namespace

cache::Sha256::Output Plan::digest() const {
    PlanHash hash;
    hash.put_all(forward_id, handle, row, kind, input_len, prefix_len, prompt_len, samples, input_ids, starts);
    for (const BlockTableDelta& delta : tables) {
        hash.put_all(delta.row, delta.first_slot, delta.count, delta.version_from, delta.version_to, delta.ids);
    }
    for (const IntArray& ids : zero_blocks) hash.put(ids);
    for (const IntArray& pairs : copy_blocks) hash.put(pairs);
    hash.put(static_cast<std::int64_t>(operations.size()));
    for (const CacheOperation& operation : operations) {
        hash.put_all(operation.op_id, static_cast<std::int64_t>(operation.kind),
                     static_cast<std::int64_t>(operation.handle), operation.group, operation.source, operation.target,
                     operation.digests, operation.offsets);
    }
    for (const PlanAbort& abort : aborts) hash.put_all(static_cast<std::int64_t>(abort.handle), abort.reason, abort.detail);
    return hash.finish();
}

}  // namespace tokenspeed
