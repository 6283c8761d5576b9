# SPDX-License-Identifier: Apache-2.0
"""Votes at every step: at once where steps are long, during the next step where they are short."""

import pytest

from fabric.checkpoint.keeping.attention import Attention
from tests.ranks import RankContext, run_ranks


def _ask(context: RankContext, long: float, speaks: dict[int, int]) -> list[bool]:
    """Nine calls; `speaks` has the calls at which a rank says something."""
    attention = Attention(context.fabric(strategy="ddp").strategy, long=long)
    answers = [attention.ask(speaks.get(call) == context.rank) for call in range(1, 10)]
    return [*answers, attention.unread(), attention.unread()]


@pytest.mark.ranks
@pytest.mark.parametrize("speaker", [0, 1])
def test_where_steps_are_long_the_answer_is_waited_for(speaker: int) -> None:
    speaks = {1: speaker, 4: speaker, 9: speaker}
    expected = [call in speaks for call in range(1, 10)]
    assert run_ranks(2, _ask, 0.0, speaks) == [[*expected, False, False]] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("speaker", [0, 1])
def test_where_steps_are_short_the_answer_comes_a_step_later(speaker: int) -> None:
    speaks = {1: speaker, 4: speaker, 9: speaker}
    expected = [call in (1, 5) for call in range(1, 10)]  # the first call does not know yet
    assert run_ranks(2, _ask, 1e9, speaks) == [[*expected, True, False]] * 2


def _ask_with_clocks(context: RankContext, longs: list[float]) -> list[bool]:
    attention = Attention(context.fabric(strategy="ddp").strategy, long=longs[context.rank])
    return [attention.ask(call == 3 and context.rank == 1) for call in range(1, 6)]


@pytest.mark.ranks
def test_the_clock_of_rank_0_counts_on_all_ranks() -> None:
    assert run_ranks(2, _ask_with_clocks, [0.0, 1e9]) == [[False, False, True, False, False]] * 2
    assert run_ranks(2, _ask_with_clocks, [1e9, 0.0]) == [[False, False, False, True, False]] * 2


def _change_of_pace(context: RankContext) -> list[bool]:
    """Short steps first; at the fourth call all ranks learn that they are long now."""
    attention = Attention(context.fabric(strategy="ddp").strategy, long=1e9)
    answers = [attention.ask(False), attention.ask(False), attention.ask(context.rank == 1)]
    attention._long = 0.0
    return [*answers, attention.ask(False), attention.ask(context.rank == 0)]


@pytest.mark.ranks
def test_no_vote_is_lost_where_steps_become_long() -> None:
    assert run_ranks(2, _change_of_pace) == [[False, False, False, True, True]] * 2


def _alone(context: RankContext) -> list[bool]:
    attention = Attention(context.fabric().strategy, long=1e9)
    return [attention.ask(call == 3) for call in range(1, 5)]


@pytest.mark.ranks
def test_one_process_asks_nobody() -> None:
    assert run_ranks(1, _alone) == [[False, False, True, False]]
