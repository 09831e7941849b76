// SHA-256 against the published vectors, and the chain of page digests.
#include <cstdio>
#include <set>

#include "cache/page_hash.h"
#include "check.h"

using namespace tokenspeed::cache;

namespace {

std::string hex(const Digest& digest) {
    std::string text;
    char pair[3];
    for (const std::uint8_t byte : digest) {
        std::snprintf(pair, sizeof pair, "%02x", byte);
        text += pair;
    }
    return text;
}

std::string sha256(const std::string& text, std::size_t piece = 1u << 20) {
    Sha256 hash;
    const std::span bytes(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
        hash.update(bytes.subspan(at, std::min(piece, bytes.size() - at)));
    }
    return hex(hash.finish());
}

void check_vectors() {
    CHECK_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK_EQ(sha256(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

}  // namespace

TEST(the_published_vectors_hold_in_the_portable_code_and_in_this_machines_own) {
    Sha256::force_portable(true);
    CHECK(!Sha256::accelerated());
    check_vectors();
    Sha256::force_portable(false);
    check_vectors();
}

TEST(both_codes_agree_at_every_length_and_however_the_input_is_cut) {
    std::string text;
    for (int length = 0; length < 200; ++length) {
        Sha256::force_portable(true);
        const std::string plain = sha256(text);
        Sha256::force_portable(false);
        CHECK_EQ(sha256(text), plain);
        for (const std::size_t piece : {1, 7, 63, 64, 65}) CHECK_EQ(sha256(text, piece), plain);
        text += static_cast<char>('a' + length % 26);
    }
}

TEST(a_chain_depends_on_namespace_on_order_and_on_where_it_is_cut) {
    const std::vector<std::int32_t> a{1, 2, 3, 4}, b{5, 6, 7, 8}, ab{1, 2, 3, 4, 5, 6, 7, 8};
    const Digest root = root_digest(""), other = root_digest("tenant");
    std::set<std::string> seen;
    for (const Digest& digest : {root, other, next_digest(root, a), next_digest(other, a), next_digest(root, b),
                                 next_digest(next_digest(root, a), b), next_digest(next_digest(root, b), a),
                                 next_digest(root, ab)}) {
        CHECK(seen.insert(hex(digest)).second);
    }
    CHECK(next_digest(root_digest(""), a) == next_digest(root, a));
    // Framing: a namespace that looks like another's continuation is not it.
    CHECK(root_digest(std::string_view("a\0", 2)) != root_digest("a"));
}
