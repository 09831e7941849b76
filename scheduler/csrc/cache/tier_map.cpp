// A picture of a pool, for people: which blocks are held, cached and free, and where they lie.
#include <algorithm>
#include <array>

#include "cache/tier.h"

namespace tokenspeed::cache {
namespace {

constexpr std::size_t kUses = kUseLetters.size();

std::size_t index_of(BlockUse use) { return static_cast<std::size_t>(use); }

// How many blocks of each use every cell has. Blocks are numbered from 0 and come in order.
class Cells {
public:
    Cells(std::int64_t cells, std::int64_t blocks) : blocks_(blocks), counts_(static_cast<std::size_t>(cells)) {
        ends_here();
    }

    void add(BlockUse use, std::int64_t count) {
        while (count > 0) {
            const std::int64_t here = std::min(count, end_ - next_);
            counts_[cell_][index_of(use)] += here;
            next_ += here;
            count -= here;
            if (next_ < end_ || next_ == blocks_) continue;
            ++cell_;
            ends_here();
        }
    }
    // A block that was added as `before` is `now`.
    void change(std::int64_t block, BlockUse before, BlockUse now) {
        std::size_t cell = static_cast<std::size_t>(block * cells() / blocks_);
        while (first_of(cell + 1) <= block) ++cell;
        --counts_[cell][index_of(before)];
        ++counts_[cell][index_of(now)];
    }

    // The use of most blocks of each cell; then every use that shows nowhere takes the cell that has most of it, of those
    // whose own use shows elsewhere.
    std::string letters() const {
        std::vector<std::size_t> shown;
        std::array<std::int64_t, kUses> times{}, total{};
        for (const auto& counts : counts_) {
            shown.push_back(static_cast<std::size_t>(std::max_element(counts.begin(), counts.end()) - counts.begin()));
            ++times[shown.back()];
            for (std::size_t use = 0; use < kUses; ++use) total[use] += counts[use];
        }
        for (std::size_t use = 0; use < kUses; ++use) {
            if (total[use] == 0 || times[use] > 0) continue;
            std::size_t best = counts_.size();
            for (std::size_t cell = 0; cell < counts_.size(); ++cell) {
                if (counts_[cell][use] == 0 || times[shown[cell]] < 2) continue;
                if (best == counts_.size() || counts_[cell][use] > counts_[best][use]) best = cell;
            }
            if (best == counts_.size()) continue;
            --times[shown[best]];
            ++times[use];
            shown[best] = use;
        }
        std::string letters;
        for (const std::size_t use : shown) letters += kUseLetters[use];
        return letters;
    }

private:
    std::int64_t cells() const { return static_cast<std::int64_t>(counts_.size()); }
    std::int64_t first_of(std::size_t cell) const { return static_cast<std::int64_t>(cell) * blocks_ / cells(); }
    void ends_here() { end_ = first_of(cell_ + 1); }

    std::int64_t blocks_;
    std::vector<std::array<std::int64_t, kUses>> counts_;
    std::size_t cell_ = 0;
    std::int64_t next_ = 0;
    std::int64_t end_ = 0;
};

}  // namespace

std::string Tier::map(int group, int cells, const std::vector<BlockId>* pinned) const {
    const Group& own = groups_[index(group)];
    const BlockUse of_held = pinned == nullptr ? BlockUse::Pinned : BlockUse::Held;
    Cells picture(std::min<std::int64_t>(cells, total(group)), total(group));
    for (int parent = 1; parent <= pool_.num_parents(); ++parent) {
        const int owner = pool_.group_of(parent);
        const Parent& its = parents_[static_cast<std::size_t>(parent)];
        if (owner != group) {
            picture.add(owner < 0 ? BlockUse::Free : BlockUse::Elsewhere, own.children);
        } else if (its.held == own.children || its.cached == own.children) {
            picture.add(its.held > 0 ? of_held : BlockUse::Cached, own.children);
        } else {
            for (BlockId id = parent * own.children; id < (parent + 1) * own.children; ++id) {
                const Meta& block = own.meta[static_cast<std::size_t>(id)];
                picture.add(block.holders > 0 ? of_held : block.indexed ? BlockUse::Cached : BlockUse::Free, 1);
            }
        }
    }
    for (std::size_t i = 0; pinned != nullptr && i < pinned->size(); ++i) {
        picture.change((*pinned)[i] - own.children, BlockUse::Held, BlockUse::Pinned);
    }
    return picture.letters();
}

}  // namespace tokenspeed::cache
