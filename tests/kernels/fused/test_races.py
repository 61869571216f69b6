"""Detection of unordered accesses within one program: true positives, and none in ordered kernels."""

from __future__ import annotations

import pytest

from tests.kernels.proof.races import early, merged, overwritten, unordered, unseen

HEAD = """#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
module attributes {"ttg.num-warps" = 4 : i32} {
  tt.func public @kernel(%a: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("a"(#loc)), %b: !tt.ptr<f32> loc("b"(#loc)), %n: i32) {
    %at = tt.splat %a : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>, #blocked> loc(#loc1)
    %at_1 = tt.addptr %at, %place : tensor<16x!tt.ptr<f32>, #blocked>, tensor<16xi32, #blocked> loc(#loc1)
"""
POINTERS = "tensor<16x!tt.ptr<f32>, #blocked>"
TAIL = """    tt.return loc(#loc9)
  } loc(#loc)
} loc(#loc)
"""
LOAD = f"%x = tt.load %at_1, %mask, %other cacheModifier = cg : {POINTERS} loc(#loc2)"
COPY = f"%x = ttg.async_copy_global_to_local %at_1, %shared mask %m : {POINTERS} -> <16xf32, #shared, #smem, mutable>"
STORE = f"tt.store %at_1, %y, %mask : {POINTERS} loc(callsite(#loc3 at #loc4))"
BARRIER = "gpu.barrier loc(#loc5)"
OTHER = "tt.store %b, %y : !tt.ptr<f32> loc(#loc6)"
IF, ELSE, FOR, END = "scf.if %0 {", "} else {", "scf.for %i = %c0_i32 to %n step %c1_i32  : i32 {", "} loc(#loc7)"
CARRY = f"%end:2 = scf.for %i = %c0_i32 to %n step %c1_i32 iter_args(%cursor = %at_1, %sum = %zero) -> ({POINTERS}, f32)  : i32 {{"
NEXT = f"%next = tt.addptr %cursor, %step : {POINTERS}, tensor<16xi32, #blocked>"
YIELD = f"scf.yield %next, %sum : {POINTERS}, f32"
REDUCE = (
    '%more = "tt.reduce"(%x) <{axis = 0 : i32}> ({', "^bb0(%p: f32, %q: f32):", "%r = arith.addf %p, %q : f32", "tt.reduce.return %r : f32",
    "}) : (tensor<16xf32, #blocked>) -> f32 loc(#loc8)",
)  # fmt: skip
COUNT = "%last = tt.atomic_rmw add, acq_rel, gpu, %b, %one, %true : (!tt.ptr<f32>, i32, i1) -> i32 loc(#loc2)"
RELAXED = COUNT.replace("acq_rel", "relaxed")
CHOSEN = ("%3 = arith.cmpi eq, %last, %c3_i32 : i32", "scf.if %3 {")
SWAP = COUNT.replace("%last", "%again")
USED = "%4 = arith.addi %again, %c1_i32 : i32"
WAIT = '%1 = tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0" {constraints = "=r", pure = false} -> i32'


def made(*lines: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in lines) + TAIL


@pytest.mark.parametrize(
    "lines",
    [
        (LOAD, STORE),
        (COPY, STORE),
        (STORE, LOAD),
        (LOAD, *REDUCE, STORE),
        (LOAD, IF, BARRIER, END, STORE),
        (IF, LOAD, ELSE, OTHER, END, STORE),
        (FOR, LOAD, BARRIER, STORE, END),
        (FOR, BARRIER, LOAD, END, STORE),
        (CARRY, f"tt.store %cursor, %y : {POINTERS}", NEXT, YIELD, END, LOAD),
        (CARRY, NEXT, YIELD, END, LOAD, f"tt.store %end#0, %y : {POINTERS}"),
    ],
)
def test_found(lines: tuple[str, ...]) -> None:
    assert unordered("kernel", made(*lines)) == ["a"]


@pytest.mark.parametrize(
    "lines",
    [
        (LOAD, BARRIER, STORE),
        (LOAD, OTHER),
        (LOAD, LOAD, OTHER, OTHER),
        (LOAD, IF, BARRIER, ELSE, BARRIER, END, STORE),
        (IF, LOAD, ELSE, STORE, END),
        (FOR, BARRIER, LOAD, BARRIER, STORE, END),
    ],
)
def test_in_order(lines: tuple[str, ...]) -> None:
    assert unordered("kernel", made(*lines)) == []


STORE_MOVED = f"tt.store %moved, %y : {POINTERS}"
MOVED = f"%moved = tt.addptr %at, %elsewhere : {POINTERS}, tensor<16xi32, #blocked>"


@pytest.mark.parametrize(
    "lines",
    [
        (STORE, STORE),
        (STORE, MOVED, STORE_MOVED),
        (IF, STORE, END, MOVED, STORE_MOVED),
        (FOR, STORE, END),
        (FOR, BARRIER, MOVED, STORE_MOVED, END, STORE),
    ],
)
def test_two_stores(lines: tuple[str, ...]) -> None:
    assert overwritten("kernel", made(*lines)) == ["a"]
    assert unordered("kernel", made(*lines)) == []


@pytest.mark.parametrize(
    "lines", [(STORE, OTHER), (STORE, BARRIER, STORE), (IF, STORE, ELSE, STORE, END), (FOR, STORE, BARRIER, END), (LOAD, STORE)]
)
def test_two_stores_in_order(lines: tuple[str, ...]) -> None:
    assert overwritten("kernel", made(*lines)) == []


def test_stores_that_are_known_to_be_apart_are_left_out() -> None:
    source = made(STORE, STORE).replace("%a", "%partial")
    assert overwritten("kernel", source) == ["partial"]
    assert overwritten("_linear", source) == []


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ((STORE, BARRIER, COUNT, *CHOSEN, LOAD, END), True),
        # Counted, but not ordered; at the scope of the block; with stores of other threads still on their way.
        ((STORE, BARRIER, RELAXED, *CHOSEN, LOAD, END), False),
        ((STORE, BARRIER, COUNT.replace("gpu", "cta"), *CHOSEN, LOAD, END), False),
        ((STORE, COUNT, *CHOSEN, LOAD, END), False),
        # What only the last program does is no arrival of the others.
        ((STORE, BARRIER, RELAXED, *CHOSEN, SWAP, USED, LOAD, END), False),
        # A place in a list, then the arrival.
        ((RELAXED, *CHOSEN, STORE, END, BARRIER, SWAP, USED, LOAD), True),
        ((STORE, BARRIER, COUNT, OTHER, "cf.cond_br %last, ^bb1, ^bb2", LOAD), True),
    ],
)
def test_parts_that_an_arrival_shows(lines: tuple[str, ...], shown: bool) -> None:
    assert unseen(made(*lines)) == ([] if shown else ["a"])
    assert "a" in merged(made(*lines)) or not shown


def test_what_a_program_keeps_for_itself_is_no_part() -> None:
    for lines in ((STORE, BARRIER, LOAD), (LOAD, COUNT, *CHOSEN, LOAD, END), (COUNT, STORE, BARRIER, LOAD)):
        assert merged(made(*lines)) == unseen(made(*lines)) == []


def test_what_is_known_to_be_disjoint_is_left_out() -> None:
    source = made(LOAD, STORE).replace("%a", "%score")
    assert unordered("kernel", source) == ["score"]
    assert unordered("_draft_level", source) == []


def test_a_pointer_from_nowhere_is_an_error() -> None:
    with pytest.raises(ValueError, match="%lost"):
        unordered("kernel", made("tt.store %lost, %y : !tt.ptr<f32>"))


@pytest.mark.parametrize(
    ("lines", "expected"), [((WAIT, LOAD, OTHER), []), ((LOAD, WAIT, OTHER), ["a"]), ((OTHER, LOAD, WAIT), ["a", "b"])]
)
def test_accesses_before_the_wait(lines: tuple[str, ...], expected: list[str]) -> None:
    assert early("kernel", made(*lines)) == expected


def test_a_wait_on_one_path_does_not_count() -> None:
    assert early("kernel", made(IF, WAIT, END, LOAD, WAIT)) == ["a"]
    assert early("kernel", made(FOR, WAIT, END, LOAD, WAIT)) == ["a"]
    with pytest.raises(ValueError, match="kernel does not wait"):
        early("kernel", made(LOAD))


def test_atomic_operations_count_as_accesses() -> None:
    assert early("kernel", made(COUNT, WAIT, LOAD)) == ["b"]


def test_weights_may_be_read_before_the_wait() -> None:
    assert early("_moe_route", made(LOAD, WAIT).replace("%a", "%bias")) == []
