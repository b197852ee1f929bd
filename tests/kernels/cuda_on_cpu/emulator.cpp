// Runs a kernel of SOURCE, which takes PARAMS, on the CPU; see primitives.cuh beside this.
#include <primitives.cuh>

#include SOURCE

namespace {
using Given = slipstream::PARAMS;
void (*kernel)(Given);
Given params;

const slipstream::bf16* weight_of(const slipstream::Params& given) { return given.weight; }
template <class Other>
const slipstream::bf16* weight_of(const Other& given) {
    return given.common.weight;
}

// Warps run apart: each now and then stands still for a while, so that a barrier that is missing shows.
bool sleeps(long turns, int warp) { return uint32_t((turns / 24 * 8 + warp) * 2654435761u) >> 30 == 0; }

// So do whole CTAs of those that run together, for longer: others are far ahead then.
bool lags(long turns, int cta) { return cta > 0 && uint32_t((turns / 512 * 8 + cta) * 2654435761u) >> 31; }

void body() {
    kernel(params);
    emulator::lanes[emulator::current].done = true;
    emulator::yield();
}
}  // namespace

// weight: the matrix, of `weight_bytes`; reads: [weight_bytes / 16] out, how often each 16 bytes were read; ranges:
// (begin, end) of what load_activation may read, x first; flows: [grid, 3] out, of each CTA (in a cluster's first row:
// of all its CTAs) its bulk copies, those of them before it let the next kernel start (-1: never), whether it then had
// not waited. Returns reads outside of everything + reads of x before the wait + threads
// that never waited.
extern "C" long run(void (*function)(Given), int grid, int threads, int ctas, int shared_bytes, const Given* given,
                    long weight_bytes, uint32_t* reads, const char** ranges, int num_ranges, long* flows) {
    using namespace emulator;
    if (shared_bytes > 4 * SHARED_FLOATS || grid % ctas) return -1;
    kernel = function;
    params = *given;
    weight_begin = reinterpret_cast<const char*>(weight_of(params));
    weight_reads.assign(weight_bytes / 16, 0);
    outside_reads = unwaited_reads = 0;
    num_activations = num_ranges;
    for (int i = 0; i < num_ranges; ++i) {
        activation_begin[i] = ranges[2 * i];
        activation_end[i] = ranges[2 * i + 1];
    }
    long never_waited = 0;
    blockDim.x = threads;
    gridDim.x = grid;
    cluster_ctas = ctas;
    const int together = threads * ctas;
    lanes.resize(together);
    for (auto& lane : lanes) lane.stack.resize(64 << 10);
    for (int block = 0; block < grid; block += ctas) {
        // What no thread wrote is NaN, inside what was asked for and outside of it.
        std::fill(shared, shared + ctas * SHARED_FLOATS, NAN);
        cta_barriers.assign(ctas, Barrier());
        some_barriers = cta_barriers;
        cluster_barrier = Barrier();
        copy_barriers.clear();
        copies.clear();
        flow = Flow();
        warp_barriers.assign(3 * (together / 32), Barrier());
        exchanged.assign(2 * together, Exchanged());
        waited.assign(together, 0);
        for (int i = 0; i < together; ++i) {
            lanes[i].done = lanes[i].in_cluster = false;
            lanes[i].exchanges = 0;
            getcontext(&lanes[i].context);
            lanes[i].context.uc_stack.ss_sp = lanes[i].stack.data();
            lanes[i].context.uc_stack.ss_size = lanes[i].stack.size();
            lanes[i].context.uc_link = nullptr;
            makecontext(&lanes[i].context, body, 0);
        }
        long turns = 0;
        for (int left = together; left > 0; land_copies()) {
            if (++turns > 100000) return -2;  // a wait for what never comes
            for (int i = 0; i < together; ++i) {
                if (lanes[i].done || sleeps(turns, i / 32) || lags(turns, i / threads)) continue;
                current = i;
                threadIdx.x = i % threads;
                blockIdx.x = block + i / threads;
                swapcontext(&scheduler, &lanes[i].context);
                left -= lanes[i].done;
            }
        }
        for (int i = 0; i < together; ++i) never_waited += !waited[i];
        const long told[] = {flow.copies, flow.copies_at_start, flow.started_unwaited};
        std::copy(told, told + 3, flows + 3 * block);
        outside_reads += copies.size();  // ended before its weights came
        for (int cta = 0; cta < ctas; ++cta) {
            for (int i = shared_bytes / 4; i < SHARED_FLOATS; ++i) {
                outside_reads += !std::isnan(shared[cta * SHARED_FLOATS + i]);
            }
        }
    }
    std::copy(weight_reads.begin(), weight_reads.end(), reads);
    return outside_reads + unwaited_reads + never_waited;
}
