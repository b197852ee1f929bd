// The hardware's part of kernels/cuda on a CPU: CTAs run one after another, each thread of a CTA is a fiber, and barriers,
// shuffles and MMAs are exchanges among fibers. Counts how often each 16 bytes of the weight are read.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#ifndef COPY_TURNS  // of the scheduler: a copy takes up to four times as many, longer than some that were issued after it
#define COPY_TURNS 1
#endif
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(threads, ctas)
#define __maxnreg__(registers)
#define __align__(bytes)

struct uint4 {
    uint32_t x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
struct float4 {
    float x, y, z, w;
};
struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
constexpr int SHARED_FLOATS = 1 << 16;           // of a CTA
alignas(128) float shared[8 * SHARED_FLOATS];  // of a cluster
using std::max;
using std::min;

namespace emulator {
struct Barrier {
    int count = 0;
    long generation = 0;
};
// Of wgmma, a lane's share: it runs as late as it may, so that whoever does not wait for it reads or changes too early.
struct Product {
    float* sums;
    int count;
    float a[2][16];  // rows g and g + 8
    const char* b;
    int next_k, next_columns;
    long group;
};
struct Lane {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<Product> products;
    long exchanges = 0, cluster_generation = 0, group = 0;
    bool done = false, in_cluster = false, fenced = false;
};
struct Exchanged {
    uint32_t words[6];
};
static std::vector<Lane> lanes;
static ucontext_t scheduler;
static unsigned current;  // lane, of all in the cluster
static int cluster_ctas;
static std::vector<Barrier> cta_barriers, some_barriers;  // by CTA of the cluster
static Barrier cluster_barrier;
static std::vector<Barrier> warp_barriers;             // [warp][whole, lower half, upper half]
static std::vector<Exchanged> exchanged;               // [parity][thread]
static const char* weight_begin;
static std::vector<uint32_t> weight_reads;
static long outside_reads, unwaited_reads;
static const char *activation_begin[8], *activation_end[8];
static int num_activations;
static std::vector<char> waited;
static long turn;  // of the scheduler, over all threads

struct CopyBarrier {
    int count, pending, bytes = 0;  // arrivals of a phase, still missing ones, bytes still to come
    long phases = 0;
    void check() {
        if (pending == 0 && bytes == 0) {
            pending = count;
            ++phases;
        }
    }
};
// A copy lands some turns after it was issued, in any order; until then its target is NaN.
struct Copy {
    uint32_t to, barrier;
    const char* from;
    int bytes;
    long due;
};
static std::map<uint32_t, CopyBarrier> copy_barriers;
static std::vector<Copy> copies;
static long copies_issued;

// What one CTA did for the next kernel.
struct Flow {
    long copies = 0;            // bulk copies
    long copies_at_start = -1;  // of the next kernel
    bool started_unwaited = false;
};
static Flow flow;

inline void land_copies() {
    ++turn;
    for (size_t i = 0; i < copies.size();) {
        const Copy copy = copies[i];
        if (copy.due > turn) {
            ++i;
            continue;
        }
        memcpy(reinterpret_cast<char*>(shared) + copy.to, copy.from, copy.bytes);
        CopyBarrier& barrier = copy_barriers.at(copy.barrier);
        barrier.bytes -= copy.bytes;
        barrier.check();
        copies.erase(copies.begin() + i);
    }
}

inline void yield() {
    swapcontext(&lanes[current].context, &scheduler);
}
inline void arrive(Barrier& barrier, int size) {
    const long generation = barrier.generation;
    if (++barrier.count == size) {
        barrier.count = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) yield();
}
// Every lane in `mask` hands in words and sees all of them.
inline const Exchanged* exchange(uint32_t mask, const Exchanged& mine) {
    const unsigned warp = current / 32, thread = current;
    const long parity = lanes[thread].exchanges++ % 2;
    Exchanged* all = &exchanged[parity * lanes.size()];
    all[thread] = mine;
    const int which = mask == 0xffffffffu ? 0 : mask == 0xffffu ? 1 : 2;
    arrive(warp_barriers[3 * warp + which], __builtin_popcount(mask));
    return all + 32 * warp;
}
}  // namespace emulator

inline unsigned emulated_rank() { return emulator::current / blockDim.x; }
inline void __syncthreads() { emulator::arrive(emulator::cta_barriers[emulated_rank()], int(blockDim.x)); }

namespace slipstream {

using bf16 = uint16_t;

inline uint64_t weight_policy(bool) { return 0; }

inline uint4 load_16(const bf16* address) {
    uint4 v;
    if (reinterpret_cast<uintptr_t>(address) % 16) ++emulator::outside_reads;
    memcpy(&v, address, 16);
    return v;
}
inline uint4 load_weight(const bf16* address, uint64_t) {
    const auto at = reinterpret_cast<const char*>(address) - emulator::weight_begin;
    if (at < 0 || size_t(at / 16) >= emulator::weight_reads.size()) {
        ++emulator::outside_reads;
        return uint4{0, 0, 0, 0};
    }
    ++emulator::weight_reads[at / 16];
    return load_16(address);
}
inline uint32_t shared_address(const void* pointer) {
    return uint32_t(static_cast<const char*>(pointer) - reinterpret_cast<const char*>(shared));
}
inline void barrier_init(uint32_t barrier, int count) {
    if (barrier % 8) ++emulator::outside_reads;
    emulator::copy_barriers[barrier] = {count, count};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
    emulator::CopyBarrier& at = emulator::copy_barriers.at(barrier);
    if (at.pending == 0) ++emulator::outside_reads;
    --at.pending;
    at.check();
}
inline void barrier_expect(uint32_t barrier, int bytes) {
    emulator::copy_barriers.at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
// As the hardware: passes when the phase of this parity is the one before the current one.
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    while (uint32_t(emulator::copy_barriers.at(barrier).phases % 2) == parity) emulator::yield();
}
inline bool in_weight(const bf16* from, int bytes) {
    const auto at = reinterpret_cast<const char*>(from) - emulator::weight_begin;
    return at >= 0 && size_t(at + bytes) <= 16 * emulator::weight_reads.size();
}
// Of the weight, or of what else is not written by a kernel before (ranges from the second on).
inline bool may_be_copied(const bf16* from, int bytes) {
    const char* at = reinterpret_cast<const char*>(from);
    if (bytes <= 0 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) return false;
    if (in_weight(from, bytes)) return true;
    for (int i = 1; i < emulator::num_activations; ++i) {
        if (at >= emulator::activation_begin[i] && at + bytes <= emulator::activation_end[i]) return true;
    }
    return false;
}
inline void bulk_load(uint32_t to, const bf16* from, int bytes, uint32_t barrier, uint64_t) {
    if (to % 16 || to + bytes > sizeof(shared) || !may_be_copied(from, bytes)) {
        ++emulator::outside_reads;
        return;
    }
    ++emulator::flow.copies;
    if (in_weight(from, bytes)) {
        const auto at = reinterpret_cast<const char*>(from) - emulator::weight_begin;
        for (int i = 0; i < bytes / 16; ++i) ++emulator::weight_reads[at / 16 + i];
    }
    std::fill(shared + to / 4, shared + (to + bytes) / 4, NAN);
    emulator::copies.push_back({to, barrier, reinterpret_cast<const char*>(from), bytes,
                                emulator::turn + 1 + emulator::copies_issued++ * 7 % 5 * COPY_TURNS});
}
inline uint4 load_shared(uint32_t from) {
    return load_16(reinterpret_cast<const bf16*>(reinterpret_cast<const char*>(shared) + from));
}
inline uint2 load_shared_8(uint32_t from) {
    uint2 v;
    if (from % 8 || from + 8 > sizeof(shared)) ++emulator::outside_reads;
    memcpy(&v, reinterpret_cast<const char*>(shared) + from, 8);
    return v;
}
// CTAs run one after another; only a kernel that waited knows the one before to be done with its counter.
inline int atomic_add(int32_t* at, int v) {
    if (!emulator::waited[emulator::current]) ++emulator::unwaited_reads;
    const int before = *at;
    *at += v;
    return before;
}
inline void sync_warp() { emulator::exchange(0xffffffffu, {}); }
inline void sync_some(int threads) { emulator::arrive(emulator::some_barriers[emulated_rank()], threads); }

inline void prefetch(const bf16* address) {  // of what no kernel before writes
    const char* at = reinterpret_cast<const char*>(address);
    for (int i = 1; i < emulator::num_activations; ++i) {
        if (at >= emulator::activation_begin[i] && at < emulator::activation_end[i]) return;
    }
    ++emulator::outside_reads;
}
inline uint4 load_activation(const bf16* address) {
    const char* at = reinterpret_cast<const char*>(address);
    for (int i = 0; i < emulator::num_activations; ++i) {
        if (at >= emulator::activation_begin[i] && at + 16 <= emulator::activation_end[i]) {
            // range 0 is x, which the kernel before writes
            if (i == 0 && !emulator::waited[emulator::current]) ++emulator::unwaited_reads;
            return load_16(address);
        }
    }
    ++emulator::outside_reads;
    return uint4{0, 0, 0, 0};
}

inline float4 load_sums(const float* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16) ++emulator::outside_reads;
    if (!emulator::waited[emulator::current]) ++emulator::unwaited_reads;
    return float4{address[0], address[1], address[2], address[3]};
}

inline float bits_to_float(uint32_t bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
inline uint32_t float_to_bits(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}
inline uint32_t rounded(float v) {  // to nearest, ties to even
    const uint32_t bits = float_to_bits(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return rounded(low) | rounded(high) << 16; }

inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    return pack_bf16(bits_to_float(a << 16) * bits_to_float(b << 16),
                     bits_to_float(a & 0xffff0000u) * bits_to_float(b & 0xffff0000u));
}

// Straight from the fragment tables of the PTX manual: A[r][k] lies with lane 4 (r % 8) + (k % 8) / 2 in register
// (r / 8) + 2 (k / 8), B[k][c] with lane 4 c + (k % 8) / 2 in register k / 8; the lower half of a register is even k.
inline void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const emulator::Exchanged* all = emulator::exchange(0xffffffffu, {{a0, a1, a2, a3, b0, b1}});
    const int lane = threadIdx.x % 32;
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) {
            const uint32_t a = all[4 * (row % 8) + (k % 8) / 2].words[row / 8 + 2 * (k / 8)];
            const uint32_t b = all[4 * column + (k % 8) / 2].words[4 + k / 8];
            sum += bits_to_float(k % 2 ? a & 0xffff0000u : a << 16) * bits_to_float(k % 2 ? b & 0xffff0000u : b << 16);
        }
        c[e] += sum;
    }
}

inline float multiply(float a, float b) { return a * b; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float reciprocal_sqrt(float x) { return 1.0f / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }

inline float shuffle_xor(uint32_t mask, float v, int lane_mask) {
    const emulator::Exchanged* all = emulator::exchange(mask, {{float_to_bits(v)}});
    return bits_to_float(all[(threadIdx.x % 32) ^ lane_mask].words[0]);
}

inline uint2 load_scales(const bf16* address) {
    uint2 v;
    if (reinterpret_cast<uintptr_t>(address) % 8) ++emulator::outside_reads;
    memcpy(&v, address, 8);
    return v;
}
inline uint32_t integers(uint32_t word, int i) {
    return pack_bf16(float(int(word >> (4 * i) & 15u) - 8), float(int(word >> (4 * i + 16) & 15u) - 8));
}
inline void mma_16x8x16_from_zero(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                  uint32_t b1) {
    for (float& v : c) v = 0.0f;
    mma_16x8x16(c, a0, a1, a2, a3, b0, b1);
}
inline uint32_t shuffle(uint32_t v, int lane) { return emulator::exchange(0xffffffffu, {{v}})[lane].words[0]; }
inline uint4* in_shared(const bf16* at) {
    const auto byte = reinterpret_cast<const char*>(at) - reinterpret_cast<const char*>(shared);
    if (byte % 16 || byte < 0 || byte + 16 > long(sizeof(shared))) ++emulator::outside_reads;
    return reinterpret_cast<uint4*>(const_cast<bf16*>(at));
}
inline uint32_t atomic_or(uint32_t* at, uint32_t v) {
    const uint32_t before = *at;
    *at |= v;
    return before;
}
inline uint32_t reduce_max(uint32_t v) {
    const emulator::Exchanged* all = emulator::exchange(0xffffffffu, {{v}});
    for (int i = 0; i < 32; ++i) v = max(v, all[i].words[0]);
    return v;
}
inline uint32_t reduce_min(uint32_t v) { return ~reduce_max(~v); }
inline int popcount(uint32_t v) { return __builtin_popcount(v); }
inline void memory_fence() {}
inline int load_list(const int32_t* address) { return *address; }
inline float load_fresh(const float* address) { return *address; }
inline uint4 load_fresh_16(const bf16* address) { return load_16(address); }
inline float4 load_fresh_4(const float* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16) ++emulator::outside_reads;
    return float4{address[0], address[1], address[2], address[3]};
}
inline void wait_for_count(const int32_t* at, int least) {
    while (*at < least) emulator::yield();
}
inline void grid_wait(int32_t* at, int ctas, bool leads) {
    if (ctas != emulator::cluster_ctas) ++emulator::outside_reads;
    const uint32_t before = atomic_add(at, leads ? int(0x80000000u - unsigned(ctas - 1)) : 1);
    while (((uint32_t(*at) ^ before) & 0x80000000u) == 0) emulator::yield();
}
inline void count_out(int32_t* at) { atomic_add(at, 1); }
inline void store_shared(bf16* to, uint4 v) { *in_shared(to) = v; }
inline uint4 load_shared(const bf16* from) { return *in_shared(from); }


inline void check_running(uint32_t address) {
    const unsigned first = address / (4 * SHARED_FLOATS) * blockDim.x;
    for (unsigned i = first; i < first + blockDim.x; ++i) {
        if (!emulator::lanes[i].done) return;
    }
    ++emulator::outside_reads;
}
inline void copies_see_memory() {}
inline void store_16(bf16* to, uint4 v) {
    if (reinterpret_cast<uintptr_t>(to) % 16) ++emulator::outside_reads;
    if (!emulator::waited[emulator::current]) ++emulator::unwaited_reads;
    memcpy(to, &v, 16);
}
// x, which the kernel before writes (range 0).
inline void bulk_load_to_all(uint32_t to, const bf16* from, int bytes, uint32_t barrier, uint64_t, int ctas) {
    const char* at = reinterpret_cast<const char*>(from);
    const emulator::Lane& lane = emulator::lanes[emulator::current];
    const bool inside = at >= emulator::activation_begin[0] && at + bytes <= emulator::activation_end[0];
    if (!emulator::waited[emulator::current] || !lane.in_cluster) ++emulator::unwaited_reads;
    if (!inside || to % 16 || bytes <= 0 || bytes % 16 || ctas != emulator::cluster_ctas) {
        ++emulator::outside_reads;
        return;
    }
    for (int rank = 0; rank < ctas; ++rank) {
        const uint32_t moved = 4 * SHARED_FLOATS * (rank - int(emulated_rank()));
        check_running(to + moved);
        std::fill(shared + (to + moved) / 4, shared + (to + moved + bytes) / 4, NAN);
        emulator::copies.push_back({to + moved, barrier + moved, at, bytes,
                                    emulator::turn + 1 + emulator::copies_issued++ * 7 % 5 * COPY_TURNS});
    }
}

inline void bulk_load_written(uint32_t to, const bf16* from, int bytes, uint32_t barrier, uint64_t) {
    const char* at = reinterpret_cast<const char*>(from);
    if (!emulator::waited[emulator::current]) ++emulator::unwaited_reads;
    if (at < emulator::activation_begin[0] || at + bytes > emulator::activation_end[0] || to % 16 || bytes <= 0 ||
        bytes % 16 || to + bytes > sizeof(shared)) {
        ++emulator::outside_reads;
        return;
    }
    std::fill(shared + to / 4, shared + (to + bytes) / 4, NAN);
    emulator::copies.push_back({to, barrier, at, bytes, emulator::turn + 1 + emulator::copies_issued++ * 7 % 5});
}

inline int opaque(int v) { return v; }
inline float* own_shared(float* all) { return all + emulated_rank() * SHARED_FLOATS; }
inline int cluster_rank() { return emulated_rank(); }
inline int cluster_size() { return emulator::cluster_ctas; }
inline void cluster_arrive() {
    emulator::Lane& lane = emulator::lanes[emulator::current];
    lane.cluster_generation = emulator::cluster_barrier.generation;
    if (++emulator::cluster_barrier.count == int(emulator::lanes.size())) {
        emulator::cluster_barrier.count = 0;
        ++emulator::cluster_barrier.generation;
    }
}
inline void cluster_wait() {
    while (emulator::cluster_barrier.generation == emulator::lanes[emulator::current].cluster_generation) {
        emulator::yield();
    }
    emulator::lanes[emulator::current].in_cluster = true;
}
// Reaching another CTA needs a wait before, and that the other one still runs.
inline uint32_t cluster_address(uint32_t address, int rank) {
    if (rank < 0 || rank >= emulator::cluster_ctas || !emulator::lanes[emulator::current].in_cluster) {
        ++emulator::outside_reads;
    }
    return address + 4 * SHARED_FLOATS * (rank - int(emulated_rank()));
}
inline float& float_in_shared(uint32_t address) {
    if (address % 4 || address + 4 > sizeof(shared)) ++emulator::outside_reads;
    return shared[address / 4];
}
inline void barrier_arrive_there(uint32_t barrier) {
    check_running(barrier);
    barrier_arrive(barrier);
}
inline void barrier_wait_for_cluster(uint32_t barrier, uint32_t parity) { barrier_wait(barrier, parity); }
inline void send_sums(uint32_t to, float a, float b, float c, float d, uint32_t barrier) {
    check_running(to);
    if (to % 16 || to / (4 * SHARED_FLOATS) != barrier / (4 * SHARED_FLOATS) || !emulator::lanes[emulator::current].in_cluster) {
        ++emulator::outside_reads;
    }
    const float sums[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) float_in_shared(to + 4 * i) = sums[i];
    emulator::CopyBarrier& at = emulator::copy_barriers.at(barrier);
    at.bytes -= 16;
    at.check();
}
inline void store_shared(uint32_t to, uint4 v) {
    if (to % 16 || to + 16 > sizeof(shared)) ++emulator::outside_reads;
    memcpy(reinterpret_cast<char*>(shared) + to, &v, 16);
}
inline void store_shared(uint32_t to, float v) { float_in_shared(to) = v; }
inline void store_there(uint32_t to, float v) {
    check_running(to);
    float_in_shared(to) = v;
}
inline float load_shared_float(uint32_t from) { return float_in_shared(from); }

inline void pdl_launch_dependents() {
    if (emulator::flow.copies_at_start >= 0) return;
    emulator::flow.copies_at_start = emulator::flow.copies;
    emulator::flow.started_unwaited = !emulator::waited[emulator::current];
}
inline void pdl_wait() { emulator::waited[emulator::current] = 1; }

}  // namespace slipstream
