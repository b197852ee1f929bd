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

void body() {
    kernel(params);
    emulator::lanes[emulator::current].done = true;
    emulator::yield();
}
}  // namespace

// weight: the matrix, of `weight_bytes`; reads: [weight_bytes / 16] out, how often each 16 bytes were read; ranges:
// (begin, end) of what load_activation may read, x first; flows: [grid, 4] out, of each CTA its bulk copies, those of them
// before it let the next kernel start (-1: never), whether it then had not waited, 16 bytes asked into the L2. Returns reads outside of everything + reads of x before the
// wait + threads that never waited.
extern "C" long run(void (*function)(Given), int grid, int threads, int shared_bytes, const Given* given,
                    long weight_bytes, uint32_t* reads, const char** ranges, int num_ranges, long* flows) {
    using namespace emulator;
    if (shared_bytes > int(sizeof(shared))) return -1;
    kernel = function;
    params = *given;
    weight_begin = reinterpret_cast<const char*>(weight_of(params));
    weight_reads.assign(weight_bytes / 16, 0);
    weight_prefetches.assign(weight_bytes / 16, 0);
    outside_reads = unwaited_reads = 0;
    num_activations = num_ranges;
    for (int i = 0; i < num_ranges; ++i) {
        activation_begin[i] = ranges[2 * i];
        activation_end[i] = ranges[2 * i + 1];
    }
    long never_waited = 0;
    blockDim.x = threads;
    gridDim.x = grid;
    lanes.resize(threads);
    for (auto& lane : lanes) lane.stack.resize(64 << 10);
    for (int block = 0; block < grid; ++block) {
        blockIdx.x = block;
        // What no thread wrote is NaN, inside what was asked for and outside of it.
        std::fill(shared, shared + sizeof(shared) / 4, NAN);
        cta_barrier = some_barrier = Barrier();
        copy_barriers.clear();
        copies.clear();
        flow = Flow();
        warp_barriers.assign(3 * (threads / 32), Barrier());
        exchanged.assign(2 * threads, Exchanged());
        waited.assign(threads, 0);
        for (int i = 0; i < threads; ++i) {
            lanes[i].done = false;
            lanes[i].exchanges = 0;
            getcontext(&lanes[i].context);
            lanes[i].context.uc_stack.ss_sp = lanes[i].stack.data();
            lanes[i].context.uc_stack.ss_size = lanes[i].stack.size();
            lanes[i].context.uc_link = nullptr;
            makecontext(&lanes[i].context, body, 0);
        }
        long turns = 0;
        for (int left = threads; left > 0; land_copies()) {
            if (++turns > 20000) return -2;  // a wait for what never comes
            for (int i = 0; i < threads; ++i) {
                if (lanes[i].done || sleeps(turns, i / 32)) continue;
                current = threadIdx.x = i;
                swapcontext(&scheduler, &lanes[i].context);
                left -= lanes[i].done;
            }
        }
        for (int i = 0; i < threads; ++i) never_waited += !waited[i];
        const long told[] = {flow.copies, flow.copies_at_start, flow.started_unwaited, flow.prefetched};
        std::copy(told, told + 4, flows + 4 * block);
        outside_reads += copies.size();  // ended before its weights came
        for (int i = shared_bytes / 4; i < int(sizeof(shared) / 4); ++i) outside_reads += !std::isnan(shared[i]);
    }
    std::copy(weight_reads.begin(), weight_reads.end(), reads);
    return outside_reads + unwaited_reads + never_waited;
}
