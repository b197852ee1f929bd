// The routed experts of a layer over INT4 weights in one kernel: gate and up, down, and the weighted sum, for entries of up to 8
// rows (expert_gemm.cuh has the same sums, bit for bit, in kernels that take any). What bounds it is the reading of the
// chosen experts, so that goes on from the first byte to the last: a CTA on each SM, one thread of which copies weights and their
// scales through a ring in shared memory, those of `down` behind those of gate and up, and waits for nobody but the ring.
//
// A slot of the ring holds 32 chunks (32 weight rows x 32 k each): of gate and up a run of one block, of which warp w takes
// chunks w and w + 16; of `down` 4 blocks, which 4 warps take whole. A unit of gate and up is a block of an entry: warp w sums
// chunks w, w + 16, .. of its K, one warp adds the 16 sums in their order. All CTAs get the same number of slots: units of gate and up in
// equal shares, slots of `down` so that it comes out even. Both are runs in the order of the lists, so that a CTA sees few experts,
// and holds its rows of x in registers.
//
// Between CTAs go counters of the units done of each entry, for which `down` waits. Behind `down` all CTAs meet, and each adds its
// share of the weighted sum: left to whoever counts a block's last entry in, nearly all of it (3.6 MB of 16 rows) fell to the
// last CTA at work, through one SM, 50 us. All CTAs are on the card together: one an SM, of one stream.
//
// A wait for parity cannot tell a phase from the one two before, so whoever waits for a slot's nth use must have seen its use
// n - 1. Of gate and up all warps see all slots; of `down` a slot's users are always the same four warps, because the ring is a
// multiple of 4. With 5 a warp takes a slot for full that the copy before has not reached yet, and the kernel ends under its copies.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

// kernels/cuda/expert_stream_launch.py has the same struct.
struct StreamParams {
    struct {
        const bf16* weight;  // gate and up: [E * blocks, chunks, 32 lanes, 4 words]
    } common;
    const bf16* scales;       // [E * blocks, chunks, 8, 4]
    const bf16* down;         // [E * down_blocks, down_chunks, 32 lanes, 4 words]
    const bf16* down_scales;  // [E * down_blocks, down_chunks, 8, 4]
    const bf16* x;            // [M, 32 chunks], row stride x_stride
    const int32_t* count;     // of entries
    const int32_t* entries;   // [most, 4]: expert, first place, rows, 0
    const int32_t* order;     // [pairs]: row of x of each place
    const int32_t* place;     // [pairs]: place of each pair m * per_token + j
    const float* gates;       // [pairs]
    const bf16* add;          // [M, N], row stride add_stride; null: nothing is added
    bf16* inner;              // [places, 32 down_chunks]
    float* scratch;           // [places, N]
    bf16* out;                // [M, N]
    int32_t* counters;        // [32 + 32 most]: CTAs that meet, units done of each entry; 0 or, the first, a sign
    int64_t x_stride, add_stride;
    int32_t M, N, pairs, per_token;
    int32_t most;                 // entries that there can be
    int32_t blocks, down_blocks;  // of an expert
    int32_t chunks, down_chunks;  // of a block
    int32_t slots;                // of the ring, a multiple of SLOT_BLOCKS
    int32_t evict_first;
    int32_t pad;
};

constexpr int STREAM_WARPS = 16, SLOT_CHUNKS = 2 * STREAM_WARPS, SLOT_BLOCKS = 4;
constexpr int WORD_BYTES = 512, SCALE_BYTES = 64;  // of a chunk
constexpr int SCALES_AT = SLOT_CHUNKS * WORD_BYTES, SLOT_BYTES = SCALES_AT + SLOT_CHUNKS * SCALE_BYTES;
constexpr int MOST_SLOTS = 8, STREAM_BARRIER_BYTES = 256;
constexpr int PART_SUMS = 8 * 36;  // of a warp: [8 rows][32 and 4: no bank conflicts]
constexpr int ENTRY_COUNTER = 32;  // from one to the next: lines of their own
constexpr int UP_DEPTH = 14, DOWN_DEPTH = 8;  // chunks of a row that a warp holds, of x and of silu(gate) * up

struct RingAt {
    int slot = 0;
    uint32_t phase = 0;
    __device__ inline void advance(int by, int slots) {
        slot += by;
        if (slot >= slots) {
            slot -= slots;
            phase ^= 1;
        }
    }
};

// sums += one chunk of 32 weight rows times 8 rows of x.
__device__ inline void add_chunk(uint4 w, uint2 s, uint4 x, float (&sums)[2][4]) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    const float by[4] = {low_float(s.x), high_float(s.x), low_float(s.y), high_float(s.y)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t a[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int q = 0; q < 4; ++q) a[half][q] = integers(words[2 * half + q / 2], 2 * i + q % 2);
        }
        float partial[4];
        mma_16x8x16_from_zero(partial, a[0][0], a[0][1], a[0][2], a[0][3], x.x, x.y);
        mma_16x8x16(partial, a[1][0], a[1][1], a[1][2], a[1][3], x.z, x.w);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][e] = multiply_add(partial[e], by[2 * i + e / 2], sums[i][e]);
    }
}

// What a CTA does: units of gate and up, and slots of `down`.
struct Share {
    int unit, last_unit, down, last_down, up_slots, down_slots;  // the last two: of a unit, of an entry
};

// Units in equal parts, and of `down` what makes the slots of all CTAs equal; equal parts of it, too, where units alone are more.
__device__ inline Share share_of(const StreamParams& p, int count) {
    const unsigned up_slots = (p.chunks + SLOT_CHUNKS - 1) / SLOT_CHUNKS, down_slots = (p.down_blocks + SLOT_BLOCKS - 1) / SLOT_BLOCKS;
    const unsigned units = count * p.blocks, downs = count * down_slots, all = units * up_slots + downs;
    const unsigned ctas = gridDim.x, cta = blockIdx.x, unit = cta * units / ctas, last_unit = (cta + 1) * units / ctas;
    const bool even = all / ctas >= (units + ctas - 1) / ctas * up_slots;
    const unsigned slots = even ? all : downs, less = even ? up_slots : 0;
    return Share{int(unit), int(last_unit), int(cta * slots / ctas - unit * less),
                 int((cta + 1) * slots / ctas - last_unit * less), int(up_slots), int(down_slots)};
}

// The weighted sum of 4 outputs of a row.
__device__ inline void add_quad(const StreamParams& p, int m, int n, const int32_t* place, const float* gates) {
    float total[4] = {};
    uint2 added{0, 0};
    if (p.add != nullptr) added = load_scales(p.add + m * p.add_stride + n);
#pragma unroll 8
    for (int pair = m * p.per_token; pair < (m + 1) * p.per_token; ++pair) {
        const float4 v = load_fresh_4(p.scratch + int64_t(place[pair]) * p.N + n);
        total[0] += multiply(gates[pair], v.x);
        total[1] += multiply(gates[pair], v.y);
        total[2] += multiply(gates[pair], v.z);
        total[3] += multiply(gates[pair], v.w);
    }
    if (p.add != nullptr) {
        total[0] += low_float(added.x);
        total[1] += high_float(added.x);
        total[2] += low_float(added.y);
        total[3] += high_float(added.y);
    }
    *reinterpret_cast<uint2*>(p.out + int64_t(m) * p.N + n) = uint2{pack_bf16(total[0], total[1]), pack_bf16(total[2], total[3])};
}

__device__ inline void experts_stream(const StreamParams& p, float* all_shared) {
    float* const shared = own_shared(all_shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t full = shared_address(shared), empty = full + 8 * MOST_SLOTS;
    const uint32_t sums_full = empty + 8 * MOST_SLOTS, sums_empty = sums_full + 8, ring = full + STREAM_BARRIER_BYTES;
    float* const sums_at = shared + (STREAM_BARRIER_BYTES + p.slots * SLOT_BYTES) / 4;
    int32_t* const entries = reinterpret_cast<int32_t*>(sums_at + STREAM_WARPS * PART_SUMS);
    int32_t *const order = entries + 4 * p.most, *const place = order + p.pairs;
    float* const gates = reinterpret_cast<float*>(place + p.pairs);
    int32_t* const units_done = p.counters + 32;

    if (threadIdx.x == 32 * STREAM_WARPS) {
        for (int i = 0; i < p.slots; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, STREAM_WARPS);
        }
        barrier_init(sums_full, STREAM_WARPS);
        barrier_init(sums_empty, 1);
    }
    // Chunks that are not there are multiplied with zeros: scales in a slot's rest must be finite.
    for (int i = threadIdx.x; i < p.slots * (SLOT_BYTES - SCALES_AT) / 16; i += blockDim.x) {
        const int slot = i / ((SLOT_BYTES - SCALES_AT) / 16);
        store_shared(ring + slot * SCALES_AT + SCALES_AT + 16 * i, uint4{0, 0, 0, 0});
    }
    barrier_init_fence();
    pdl_wait();  // which experts they are is written by the kernel before
    pdl_launch_dependents();
    const int count = load_list(p.count);
    for (int i = threadIdx.x; i < 4 * p.most; i += blockDim.x) entries[i] = load_list(p.entries + i);
    for (int i = threadIdx.x; i < p.pairs; i += blockDim.x) {
        order[i] = load_list(p.order + i);
        place[i] = load_list(p.place + i);
        gates[i] = load_fresh(p.gates + i);
    }
    const Share share = share_of(p, count);
    __syncthreads();

    if (warp == STREAM_WARPS) {
        if (lane == 0) {
            const uint64_t policy = weight_policy(p.evict_first != 0);
            RingAt at;
            int asked = 0;
            const auto ask = [&](const bf16* weight, const bf16* scales, int chunks) {
                if (asked++ >= p.slots) barrier_wait(empty + 8 * at.slot, at.phase ^ 1);
                const uint32_t to = ring + at.slot * SLOT_BYTES;
                barrier_expect(full + 8 * at.slot, chunks * (WORD_BYTES + SCALE_BYTES));
                bulk_load(to, weight, chunks * WORD_BYTES, full + 8 * at.slot, policy);
                bulk_load(to + SCALES_AT, scales, chunks * SCALE_BYTES, full + 8 * at.slot, policy);
                at.advance(1, p.slots);
            };
            for (int unit = share.unit; unit < share.last_unit; ++unit) {
                const int entry = unit / p.blocks, block = unit - entry * p.blocks;
                const int64_t chunk = (int64_t(entries[4 * entry]) * p.blocks + block) * p.chunks;
                const bf16 *weight = p.common.weight + chunk * (WORD_BYTES / 2), *scales = p.scales + chunk * (SCALE_BYTES / 2);
                for (int c = 0; c < p.chunks; c += SLOT_CHUNKS) {
                    ask(weight + c * (WORD_BYTES / 2), scales + c * (SCALE_BYTES / 2), min(SLOT_CHUNKS, p.chunks - c));
                }
            }
            for (int at_down = share.down; at_down < share.last_down;) {
                const int entry = at_down / share.down_slots, first = at_down - entry * share.down_slots;
                const int slots = min(share.down_slots - first, share.last_down - at_down);
                const int64_t chunk = (int64_t(entries[4 * entry]) * p.down_blocks + SLOT_BLOCKS * first) * p.down_chunks;
                const bf16 *weight = p.down + chunk * (WORD_BYTES / 2), *scales = p.down_scales + chunk * (SCALE_BYTES / 2);
                for (int i = 0; i < slots; ++i) {
                    const int c = SLOT_BLOCKS * i * p.down_chunks;
                    ask(weight + c * (WORD_BYTES / 2), scales + c * (SCALE_BYTES / 2),
                        min(SLOT_BLOCKS, p.down_blocks - SLOT_BLOCKS * (first + i)) * p.down_chunks);
                }
                at_down += slots;
            }
        }
        return;
    }

    RingAt at;
    const uint32_t words_from = opaque(ring + warp * WORD_BYTES + 16 * lane);
    const uint32_t scales_from = opaque(ring + SCALES_AT + warp * SCALE_BYTES + 8 * g);
    uint4 x[UP_DEPTH];
    int held = -1;  // the entry whose rows x are
    for (int unit = share.unit; unit < share.last_unit; ++unit) {
        const int entry = unit / p.blocks, block = unit - entry * p.blocks, turn = unit - share.unit;
        const int first = entries[4 * entry + 1], rows = entries[4 * entry + 2];
        if (entry != held) {
            held = entry;
            // A column without a row reads the entry's first one, and nobody reads its sums.
            const bf16* const from = p.x + order[first + (g < rows ? g : 0)] * p.x_stride + 32 * warp + 8 * t;
#pragma unroll
            for (int u = 0; u < UP_DEPTH; ++u) {
                x[u] = uint4{0, 0, 0, 0};
                if (STREAM_WARPS * u + warp < p.chunks) x[u] = load_activation(from + 32 * STREAM_WARPS * u);
            }
        }
        float sums[2][4] = {};
#pragma unroll
        for (int s = 0; s < UP_DEPTH / 2; ++s) {
            if (SLOT_CHUNKS * s < p.chunks) {
                const int slot_at = at.slot * SLOT_BYTES;
                barrier_wait(full + 8 * at.slot, at.phase);
                uint4 w[2];
                uint2 scale[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    w[i] = load_shared(words_from + slot_at + i * STREAM_WARPS * WORD_BYTES);
                    scale[i] = load_shared_8(scales_from + slot_at + i * STREAM_WARPS * SCALE_BYTES);
                }
                sync_warp();
                if (lane == 0) barrier_arrive(empty + 8 * at.slot);
                at.advance(1, p.slots);
                add_chunk(w[0], scale[0], x[2 * s], sums);
                add_chunk(w[1], scale[1], x[2 * s + 1], sums);
            }
        }
        barrier_wait(sums_empty, (turn & 1) ^ 1);  // whoever added the unit before has read it
        float* const mine = sums_at + warp * PART_SUMS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) mine[(2 * t + e % 2) * 36 + 16 * i + g + 8 * (e / 2)] = sums[i][e];
        }
        sync_warp();
        if (lane == 0) barrier_arrive(sums_full);
        if (warp == turn % STREAM_WARPS) {
            barrier_wait(sums_full, turn & 1);
            for (int column = 0; column < rows; ++column) {
                const float* const from = sums_at + column * 36 + lane;  // a lane adds one weight row
                float total = from[0];
#pragma unroll
                for (int v = 1; v < STREAM_WARPS; ++v) total += from[v * PART_SUMS];
                total = round_bf16(total);
                const float up = bits_to_float(shuffle(float_to_bits(total), lane | 16));
                const float activated = round_bf16(total / (1.0f + exponential(-total)));
                if (lane < 16) {
                    p.inner[int64_t(first + column) * 32 * p.down_chunks + 16 * block + lane] = float_to_bf16(multiply(activated, up));
                }
            }
            sync_warp();
            if (lane == 0) {
                barrier_arrive(sums_empty);
                count_out(units_done + ENTRY_COUNTER * entry);
            }
        }
    }

    const int turn = warp / SLOT_BLOCKS, member = warp % SLOT_BLOCKS;
    at.advance(turn, p.slots);
    held = -1;
    for (int down = share.down + turn; down < share.last_down; down += STREAM_WARPS / SLOT_BLOCKS) {
        const int entry = down / share.down_slots, block = SLOT_BLOCKS * (down - entry * share.down_slots) + member;
        const int first = entries[4 * entry + 1], rows = entries[4 * entry + 2];
        if (entry != held && block < p.down_blocks) {
            held = entry;
            if (lane == 0) wait_for_count(units_done + ENTRY_COUNTER * entry, p.blocks);
            sync_warp();
            const bf16* const from = p.inner + int64_t(first + (g < rows ? g : 0)) * 32 * p.down_chunks + 8 * t;
#pragma unroll
            for (int u = 0; u < DOWN_DEPTH; ++u) {
                x[u] = uint4{0, 0, 0, 0};
                if (u < p.down_chunks) x[u] = load_fresh_16(from + 32 * u);
            }
        }
        float sums[2][4] = {};
        barrier_wait(full + 8 * at.slot, at.phase);
        const uint32_t words_at = ring + at.slot * SLOT_BYTES + member * p.down_chunks * WORD_BYTES + 16 * lane;
        const uint32_t scales_at = ring + at.slot * SLOT_BYTES + SCALES_AT + member * p.down_chunks * SCALE_BYTES + 8 * g;
#pragma unroll
        for (int u = 0; u < DOWN_DEPTH; ++u) {
            add_chunk(load_shared(words_at + u * WORD_BYTES), load_shared_8(scales_at + u * SCALE_BYTES), x[u], sums);
        }
        sync_warp();
        if (lane < STREAM_WARPS / SLOT_BLOCKS) barrier_arrive(empty + 8 * at.slot);
        at.advance(STREAM_WARPS / SLOT_BLOCKS, p.slots);
        if (block < p.down_blocks) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = 2 * t + e % 2;
                if (column < rows) {
                    float* const to = p.scratch + int64_t(first + column) * p.N + 32 * block + g + 8 * (e / 2);
                    to[0] = sums[0][e];
                    to[16] = sums[1][e];
                }
            }
        }
    }

    sync_some(32 * STREAM_WARPS);
    if (threadIdx.x == 0) grid_wait(p.counters, gridDim.x, blockIdx.x == 0);
    sync_some(32 * STREAM_WARPS);
    const int ctas = gridDim.x, quads = p.N / 4, all = p.M * quads, last = int(int64_t(blockIdx.x + 1) * all / ctas);
    for (int i = blockIdx.x + ctas * threadIdx.x; i < count; i += ctas * 32 * STREAM_WARPS) units_done[ENTRY_COUNTER * i] = 0;
    for (int i = int(int64_t(blockIdx.x) * all / ctas) + threadIdx.x; i < last; i += 32 * STREAM_WARPS) {
        add_quad(p, i / quads, 4 * (i % quads), place, gates);
    }
}

}  // namespace slipstream
