"""What the sanitizer wrote is read rightly: what counts, what is another library's, and that nothing is lost."""

from pathlib import Path

import pytest

FOREIGN = """========= Error: Race reported between Read access at nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT+0xb00
=========     and Write access at nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT+0x2820 [8 hazards]
=========
"""
RING = """========= Error: Race reported between Write access at bulk_0_0_1_2_1_4+0x{:x}
=========     and Read access at bulk_0_0_1_2_1_4+0x800 [7440 hazards]
=========     and Read access at bulk_0_0_1_2_1_4+0x830 [7440 hazards]
=========
"""
BARRIER = """========= Barrier error detected. Divergent thread(s) in block.
=========     at bulk_0_0_1_1_1_16+0x3c00
=========     by thread (256,0,0) in block (2,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
"""
COPY, SENT, STORE = 0x42F0, 0x4380, 0x4410
WORD = """========= Error: Race reported between Read access at bulk_0_0_1_2_1_4+0xe30
=========     and Write access at bulk_0_0_1_2_1_4+0x5130 [12 hazards]
=========
"""
RING_WORD = {  # as nvcc 13.0 made it
    0x0DE0: "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R0 ",
    0x0E10: "BRA `(.L_x_1161) ",
    0x0E30: "LDS R50, [R50+0x100] ",
    0x50E0: "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R27+URZ+0x78], R18 ",
    0x5130: "STS [R21+0x100], R10 ",
    0x5150: "SYNCS.ARRIVE.TRANS64 RZ, [R27+URZ], R16 ",
}


SUMS = """========= Error: Race reported between Write access at experts_stream+0x6360
=========     and Read access at experts_stream+0x6680 [7152 hazards]
=========     and Read access at experts_stream+0x6690 [2160 hazards]
=========
"""
SUMS_CODE = {  # of one warp; another adds them up
    0x6300: "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R8+URZ+0x88], R4 ",
    0x6350: "STS [R92], R5 ",
    0x6360: "STS [R92+0x90], R3 ",
    0x6370: "STS [R92+0x20], R82 ",
    0x6430: "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R8+URZ+0x80], RZ ",
    0x64E0: "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R8+URZ+0x80], R7 ",
    0x65D0: "WARPSYNC.ALL ",
    0x6680: "LDS R8, [R5+0x480] ",
    0x6690: "LDS R11, [R5] ",
}
ALONE = {  # a cluster's wait, and what stands for it where a CTA is alone, as nvcc 13.0 made it
    0x3BA0: "UCGABAR_WAIT ",
    0x3BC0: "UCGABAR_WAIT ",
    0x3BD0: "CCTL.IVALL ",
    0x3BE0: "BRA `(.L_x_361) ",
    0x3BF0: "WARPSYNC.ALL ",
    0x3C00: "BAR.SYNC.DEFER_BLOCKING 0x0 ",
}


@pytest.fixture(scope="module")
def sanitize(load_test_module):
    return load_test_module(Path(__file__).parent / "sanitize.py")


def instruction(kernel: str, address: int) -> str:
    code = {COPY: "UBLKCP.S.G [UR10], [UR8], UR6, desc[UR4] ", SENT: "STAS [R2], R4 ", STORE: "STS.128 [R2], R4 "}
    return code.get(address, "")


def race(count: int) -> str:
    return f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"


def test_only_races_of_ours_that_no_mbarrier_orders_are_counted(sanitize):
    words = FOREIGN * 3 + RING.format(COPY) + RING.format(SENT) + RING.format(STORE) + race(6)
    found = sanitize.errors_of("racecheck", words, instruction)
    assert found.counted == 1
    assert found.aside[sanitize.IN_LIBRARIES].total() == 3
    assert dict(found.aside[sanitize.OF_BULK_COPIES]) == {"bulk_0_0_1_2_1_4": 2}
    assert len(found.describe()) == 2
    assert "3 in other libraries' kernels: nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT 3" in found.describe()[0]


def test_a_word_beside_a_bulk_copy_is_told_apart_by_its_wait_and_arrival(sanitize):
    def found(**changed: str):
        code = RING_WORD | {int(address[1:], 16): word for address, word in changed.items()}
        return sanitize.errors_of("racecheck", WORD + race(1), lambda _, address: code.get(address, ""))

    assert found().counted == 0
    assert dict(found().aside[sanitize.OF_WORDS]) == {"bulk_0_0_1_2_1_4": 1}
    assert found(x50e0="").counted == 1  # the writer does not wait
    assert found(x5150="").counted == 1  # nor tell anyone
    assert found(x5140="LDS R11, [R21+0x104] ").counted == 1  # it reads in between
    assert found(x5140="STS [R21+0x104], R10 ").counted == 0  # it stores more
    assert found(x5150="SYNCS.ARRIVE.TRANS64 RZ, [R27+URZ+0x8], R16 ").counted == 1  # tells another than who waits
    assert found(x50e0="SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R27+URZ], R18 ").counted == 1  # waits for its own word
    assert found(x50e0="BAR.SYNC.DEFER_BLOCKING 0x0 ").counted == 1
    assert found(x0de0="").counted == 1  # the reader does not wait
    assert found(x0de0="BAR.SYNC 0x0 ").counted == 1
    assert found(x5130="ST.E [R20], R10 ").counted == 1  # not shared memory


def test_sums_that_a_warp_hands_on_are_told_apart(sanitize):
    def found(changed: dict[int, str]):
        return sanitize.errors_of(
            "racecheck", SUMS + race(1), lambda _, address: (SUMS_CODE | changed).get(address, "")
        )

    assert found({}).counted == 0
    assert dict(found({}).aside[sanitize.OF_WORDS]) == {"experts_stream": 1}
    assert found({0x6300: ""}).counted == 1
    assert found({0x6430: SUMS_CODE[0x6430].replace("0x80", "0x90")}).counted == 1
    assert found({0x64E0: "BAR.SYNC.DEFER_BLOCKING 0x1, R6 "}).counted == 1


def test_the_barrier_of_a_cta_that_is_its_own_cluster_is_told_apart(sanitize):
    def found(words: str, changed: dict[int, str]):
        more = "========= ERROR SUMMARY: 3 errors\n"
        return sanitize.errors_of("synccheck", words + more, lambda _, address: (ALONE | changed).get(address, ""))

    words = BARRIER * 3
    assert found(words, {}).counted == 0
    assert dict(found(words, {}).aside[sanitize.OF_CLUSTERS]) == {"bulk_0_0_1_1_1_16": 3}
    assert found(words, {0x3BC0: ""}).counted == 3  # a barrier of the CTA's own
    assert found(words, {0x3C00: "WARPSYNC.ALL "}).counted == 3  # divergent somewhere else


def test_a_kernel_that_is_not_known_is_ours(sanitize):
    assert sanitize.errors_of("racecheck", RING.format(COPY) + race(1), lambda *_: "").counted == 1
    mixed = FOREIGN.replace("Write access at nvjet_sm90_tst_64x8", "Write access at bulk_0", 1)
    assert sanitize.errors_of("racecheck", mixed + race(1), instruction).counted == 1


def test_errors_that_were_not_printed_are_counted(sanitize):
    assert sanitize.errors_of("racecheck", FOREIGN * 2 + race(112), instruction).counted == 110
    more = "========= ERROR SUMMARY: 160 errors\n========= ERROR SUMMARY: 140 errors were not printed. Use ..\n"
    assert sanitize.errors_of("synccheck", BARRIER * 20 + more, instruction).counted == 160
    reader = "=========     at void at::native::copy()+0x830\n"  # whose memory it was, nobody says
    assert sanitize.errors_of("initcheck", reader + more, instruction).counted == 160


def test_no_errors_and_no_summary(sanitize):
    none = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitize.errors_of("memcheck", none, instruction).counted == 0
    assert sanitize.errors_of("synccheck", none, instruction).counted == 0
    assert sanitize.errors_of("racecheck", race(0), instruction).counted == 0
    assert sanitize.errors_of("memcheck", "========= COMPUTE-SANITIZER\n", instruction) is None
