"""Rewards of any functions add up by weight, and a fault costs its own rows and no other."""

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st
from properties.effort import few

from grpo_moe.rewards import RewardCaller

bad_cells = st.sampled_from([math.nan, math.inf, "1", [1.0], {}, 1j, 10**400, object(), b"1"])
good_cells = st.one_of(st.none(), st.floats(-100, 100), st.integers(-9, 9), st.booleans())
cells = st.one_of(good_cells, good_cells, good_cells, bad_cells)


def function_of(column, kind):
    def plain(prompts, completions, **columns):
        return [column[int(c)] for c in completions]

    async def later(prompts, completions, **columns):
        await asyncio.sleep(0)
        return tuple(column[int(c)] for c in completions)

    return later if kind else plain


def is_bad(cell) -> bool:
    return not (cell is None or (isinstance(cell, int | float) and abs(cell) < 1e300))


@few(50)
@given(st.data())
def test_a_cell_that_is_no_number_costs_its_row_and_no_other(data):
    rows, functions = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    matrix = [data.draw(st.lists(cells, min_size=rows, max_size=rows)) for _ in range(functions)]
    weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, -0.5, 2.0]), min_size=functions, max_size=functions))
    made = [function_of(column, data.draw(st.booleans())) for column in matrix]
    output = RewardCaller(made, weights, on_error="skip")(["p"] * rows, [str(i) for i in range(rows)], {})
    for row in range(rows):
        column = [(matrix[f][row], weights[f]) for f in range(functions)]
        assert output.skipped[row] == any(is_bad(cell) and weight for cell, weight in column)
        known = [weight * cell for cell, weight in column if cell is not None and not is_bad(cell)]
        if output.skipped[row] or not known:
            assert math.isnan(output.rewards[row])
        else:
            assert math.isclose(output.rewards[row], sum(known), abs_tol=1e-9)
    assert sum(output.faults.values()) == sum(is_bad(cell) for column in matrix for cell in column)


@few(40)
@given(
    groups=st.integers(1, 4),
    size=st.integers(1, 3),
    odd=st.sets(st.integers(0, 11)),
    error=st.sampled_from([KeyError("a"), ValueError(), ZeroDivisionError("x\ny"), StopIteration(), AssertionError()]),
    is_async=st.booleans(),
)
def test_completions_that_a_function_chokes_on_cost_their_groups(groups, size, odd, error, is_async):
    def score(prompts, completions, **columns):
        if odd & {int(c) for c in completions}:
            raise error
        return [float(c) for c in completions]

    async def later(prompts, completions, **columns):
        return score(prompts, completions, **columns)

    rows = groups * size
    caller = RewardCaller(later if is_async else score, on_error="skip")
    output = caller(["p"] * rows, [str(i) for i in range(rows)], {}, group_size=size)
    lost = [bool(odd & set(range(first, first + size))) for first in range(0, rows, size) for _ in range(size)]
    assert output.skipped == lost
    assert [r for r, gone in zip(output.rewards, lost, strict=True) if not gone] == [
        float(i) for i in range(rows) if not lost[i]
    ]


@few(40)
@given(columns=st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), st.one_of(
    st.lists(st.integers(), max_size=3), st.none(), st.integers(), st.just("ab"), st.just({"a": 1})), max_size=3,
))  # fmt: skip
def test_any_columns_reach_a_function_or_one_is_named(columns):
    def seen(prompts, completions, **given):
        assert given == {name: list(column) for name, column in columns.items()}
        return [1.0, 2.0]

    fits = all(
        isinstance(name, str)
        and name not in ("prompts", "completions")
        and isinstance(column, list | str)
        and len(column) == 2
        for name, column in columns.items()
    )
    try:
        output = RewardCaller(seen)(["p", "p"], ["a", "b"], columns)
    except ValueError as error:
        assert not fits and " must " in str(error) and ", got " in str(error) and "; " in str(error)
    else:
        assert fits and output.rewards == [1.0, 2.0]
