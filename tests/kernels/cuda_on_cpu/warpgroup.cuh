// wgmma and its like on the emulated GPU.
#pragma once
#include <primitives.cuh>

namespace slipstream {

inline uint32_t turned(uint32_t v) {
    const emulator::Exchanged* all = emulator::exchange(0xffffffffu, {{v}});
    const int column = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
    const auto at = [&](int r) { return all[4 * r + column / 2].words[0] >> 16 * (column % 2) & 0xffffu; };
    return at(row) | at(row + 1) << 16;
}
template <int COUNT>
inline void fewer_registers() {}
template <int COUNT>
inline void more_registers() {}
// x, or weights, which reach other CTAs only behind the cluster's barrier.
inline void bulk_load_to(uint32_t to, const bf16* from, int bytes, uint32_t barrier, uint64_t policy, int rank, uint32_t mask) {
    const char* at = reinterpret_cast<const char*>(from);
    const emulator::Lane& lane = emulator::lanes[emulator::current];
    if (in_weight(from, bytes)) {
        const bool others = mask != 1u << rank;
        if (others && !lane.in_cluster) ++emulator::unwaited_reads;
        bulk_load(to, from, bytes, barrier, policy);
    } else if (!emulator::waited[emulator::current] || !lane.in_cluster) {
        ++emulator::unwaited_reads;
    }
    const bool inside = at >= emulator::activation_begin[0] && at + bytes <= emulator::activation_end[0];
    if (rank != int(emulated_rank()) || !(mask >> rank & 1) || mask >> emulator::cluster_ctas || to % 16 || bytes <= 0 ||
        bytes % 16 || !(inside || in_weight(from, bytes))) {
        ++emulator::outside_reads;
        return;
    }
    for (int other = 0; other < emulator::cluster_ctas; ++other) {
        if (!(mask >> other & 1) || (other == rank && in_weight(from, bytes))) continue;
        const uint32_t moved = 4 * SHARED_FLOATS * (other - rank);
        check_running(to + moved);
        std::fill(shared + (to + moved) / 4, shared + (to + moved + bytes) / 4, NAN);
        emulator::copies.push_back({to + moved, barrier + moved, at, bytes,
                                    emulator::turn + 1 + emulator::copies_issued++ * 7 % 5});
    }
}

inline uint64_t wgmma_operand(uint32_t address, int next_k, int next_columns) {
    if (address % 16 || next_k % 16 || next_columns % 16 || address >= sizeof(shared)) ++emulator::outside_reads;
    return uint64_t(address) | uint64_t(next_k) << 32 | uint64_t(next_columns) << 48;
}
inline uint64_t wgmma_moved(uint64_t operand, uint32_t bytes) {
    return wgmma_operand(uint32_t(operand) + bytes, operand >> 32 & 0xffff, operand >> 48);
}
inline void wgmma_fence() { emulator::lanes[emulator::current].fenced = true; }
inline void wgmma_commit() {
    emulator::lanes[emulator::current].fenced = false;
    ++emulator::lanes[emulator::current].group;
}
// A warp's 16 rows of it.
template <int COUNT>
inline void wgmma(float (&sums)[COUNT], uint4 a, uint64_t b) {
    emulator::Lane& mine = emulator::lanes[emulator::current];
    if (!mine.fenced) ++emulator::outside_reads;
    const emulator::Exchanged* all = emulator::exchange(0xffffffffu, {{a.x, a.y, a.z, a.w}});
    emulator::Product product{sums, COUNT, {}, reinterpret_cast<const char*>(shared) + uint32_t(b)};
    product.next_k = b >> 32 & 0xffff;
    product.next_columns = b >> 48;
    product.group = mine.group;
    for (int k = 0; k < 16; ++k) {
        for (int half = 0; half < 2; ++half) {
            const uint32_t word = all[threadIdx.x % 32 / 4 * 4 + k % 8 / 2].words[half + 2 * (k / 8)];
            product.a[half][k] = bits_to_float(k % 2 ? word & 0xffff0000u : word << 16);
        }
    }
    mine.products.push_back(product);
}
// Each sum as that of mma_16x8x16: on a card they are the same, bit for bit.
inline void run_product(const emulator::Product& product) {
    for (int i = 0; i < product.count; ++i) {
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const char* from = product.b + column / 8 * product.next_columns + column % 8 * 16;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) {
            bf16 b;
            memcpy(&b, from + k / 8 * product.next_k + k % 8 * 2, 2);
            sum += product.a[i % 4 / 2][k] * bits_to_float(uint32_t(b) << 16);
        }
        product.sums[i] += sum;
    }
}
template <int PENDING>
inline void wgmma_wait() {
    emulator::Lane& mine = emulator::lanes[emulator::current];
    size_t done = 0;
    while (done < mine.products.size() && mine.products[done].group < mine.group - PENDING) {
        run_product(mine.products[done++]);
    }
    mine.products.erase(mine.products.begin(), mine.products.begin() + done);
}
template <int COUNT>
inline void wgmma_done(float (&)[COUNT]) {
    if (!emulator::lanes[emulator::current].products.empty()) ++emulator::outside_reads;
}

}  // namespace slipstream
